"""A callback for Lightning's Trainer.

    from napkin.hooks import lightning_callback

    trainer = Trainer(callbacks=[lightning_callback()])

The step that is planned is the module's own: `training_step` of a fake twin on the first batch, backward pass, clipping
and optimizer, in Lightning's order, in which gradients are cleared between forward and backward pass. Of a module that
steps its optimizers by hand, `training_step` is the whole step.
"""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from napkin.accounting.ledger import Ledger
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.hooks.fake_step import Twins, count_fake_step, is_on_cuda, signature_of, tokens_of
from napkin.hooks.watched_loop import LoopHook, WatchedLoop


def lightning_callback(
    *,
    run: StrPath | None = "auto",
    plan: bool = True,
    on: str | None = None,
    usd_per_hour: float | None = None,
    watts: float | None = None,
    say: Callable[[str], Any] | None = print,
) -> "LightningHook":
    """A callback that plans, meters and reconciles the steps of Lightning's `Trainer`; its arguments
    are those of `trainer_callback`, with `runs/MODULE` as the folder of "auto".

    Raises NapkinError where neither `lightning` nor `pytorch_lightning` is installed.
    """
    # The same classes under two names, which must not be mixed: the one that the program has imported.
    if "lightning.pytorch" not in sys.modules and "pytorch_lightning" in sys.modules:
        from pytorch_lightning import Callback  # pyright: ignore[reportMissingImports]
    else:
        try:
            from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports]
        except ImportError:
            try:
                from pytorch_lightning import Callback  # pyright: ignore[reportMissingImports]
            except ImportError:
                raise NapkinError("lightning_callback: Lightning is not installed: pip install lightning") from None
    kind = type("NapkinCallback", (LightningHook, Callback), {})
    return kind(run=run, plan=plan, on=on, usd_per_hour=usd_per_hour, watts=watts, say=say)


class LightningHook(LoopHook):
    """The events of Lightning's `Trainer` that napkin listens to; `lightning_callback` makes one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._ready = 0.0
        self._first_step = self._tokens = 0
        self._in_step = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._first_step = trainer.global_step
        steps = trainer.estimated_stepping_batches
        self.watched = WatchedLoop(
            pl_module,
            program="Lightning Trainer",
            run=self._folder(type(pl_module).__name__),
            steps=int(steps) - self._first_step if 0 < steps < float("inf") else None,
            n_devices=trainer.num_devices * trainer.num_nodes,
            settings={
                "precision": str(trainer.precision),
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
                "gradient_clip_val": trainer.gradient_clip_val,
                "max_steps": trainer.max_steps,
                "max_epochs": trainer.max_epochs,
            },
            say=self._say,
            **self._options,
        )
        loader = getattr(trainer, "train_dataloader", None)
        workers = getattr(loader, "num_workers", None)
        self.watched.n_workers = workers if isinstance(workers, int) else None
        self._ready = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        watched = self.watched
        if watched is None:
            return
        # Lightning fetches a batch between the end of the last one and the beginning of this one.
        watched.add_waiting(time.perf_counter() - self._ready)
        if self._in_step:
            return
        size = signature_of(batch)
        if self._plans and not watched.steps:
            watched.plan_by(
                functools.partial(count_lightning_step, trainer, pl_module, batch, batch_idx),
                size=size,
                tokens=tokens_of(batch) * trainer.accumulate_grad_batches,
            )
        watched.begin_step(size)
        self._in_step, self._tokens = True, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        watched = self.watched
        if watched is None:
            return
        self._tokens += tokens_of(batch)
        # The last batches of an epoch update the model too, if there are fewer.
        if trainer.global_step > self._first_step + watched.steps:
            watched.end_step(self._tokens)
            self._in_step = False
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if isinstance(loss, Tensor):
                watched.log(loss=loss.detach() * trainer.accumulate_grad_batches)
        self._ready = self._part_begin = time.perf_counter()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._part_begin = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.watched is not None and self.watched.steps:
            now = time.perf_counter()
            self.watched.add_part("evaluation", now - self._part_begin)
            self._ready = now

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        # From here to the next batch, the checkpoint is written; no event marks its end.
        self._ready = time.perf_counter()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.watched is not None:
            self.watched.abort_step(exception)
            self._fail()
            self._in_step = False

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()


def count_lightning_step(trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> Ledger:
    """Count one update of a Lightning module, on a batch that has been drawn.

    Raises NapkinError where the step cannot be traced.
    """
    twins, originals = Twins(), trainer.optimizers
    # The module refers to its trainer, which refers to everything.
    twins.replaced(trainer, None)
    for name in ("_trainer", "_fabric"):
        if getattr(pl_module, name, None) is not None:
            twins.replaced(getattr(pl_module, name), None)
    twin: Any = twins.of_module(pl_module)
    optimizers = [twins.of_optimizer(each) for each in originals]
    n_batches = trainer.accumulate_grad_batches
    clip, by = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    parameters = list(twin.parameters())
    vars(twin).update(
        log=_nothing,
        log_dict=_nothing,
        print=_nothing,
        optimizers=lambda use_pl_optimizer=True: optimizers[0] if len(optimizers) == 1 else optimizers,
        lr_schedulers=lambda: None,
        manual_backward=lambda loss, *args, **kwargs: loss.backward(*args, **kwargs),
        _trainer=_Detached(trainer),
    )

    def step(batches: Any) -> None:
        for number, each in enumerate(batches):
            with trainer.precision_plugin.train_step_context():
                output = twin.training_step(*((each, batch_idx) if _takes_index(twin) else (each,)))
            if not twin.automatic_optimization:
                continue
            loss = output["loss"] if isinstance(output, dict) else output
            if number == 0:
                optimizers[0].zero_grad()
            if loss is not None:
                (loss / n_batches).backward()
        if not twin.automatic_optimization:
            return
        if clip and str(by or "norm").rpartition(".")[2].lower() == "value":
            nn.utils.clip_grad_value_(parameters, clip)
        elif clip:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizers[0].step()

    return count_fake_step(twins, twin, step, [batch] * n_batches, on_cuda=is_on_cuda(pl_module.parameters()))


class _Detached:
    """The trainer as a module's step may read it; nothing that the step sets or calls changes the real one."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        if isinstance(value, (bool, int, float, str, type(None))):
            return value
        raise NapkinError(f"the module's step uses its trainer's '{name}', which a trace does not have")


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _takes_index(module: Any) -> bool:
    import inspect

    parameters = list(inspect.signature(module.training_step).parameters.values())
    return len(parameters) > 1 or any(each.kind is each.VAR_POSITIONAL for each in parameters)
