"""A callback for transformers' Trainer, and so for TRL's trainers.

    from napkin.hooks import trainer_callback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[trainer_callback()])

The step that is planned is the trainer's own: `training_step` of a shallow copy of the trainer, on fake twins of its
models, its optimizer and its first batches, then its clipping, its optimizer, and clearing of gradients. The batches
are those that the trainer has drawn: nothing is read ahead. For trainers that generate their training data, such as
GRPO's, a step begins after generation: its training is counted and metered, and the seconds of generation are reported
separately.
"""

import contextlib
import copy
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from napkin.accounting.counting import transformers_not_tracing
from napkin.accounting.ledger import Ledger
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.hooks.fake_step import Twins, count_fake_step, is_on_cuda, signature_of, tokens_of
from napkin.hooks.longest_batch import LongestBatch
from napkin.hooks.watched_loop import LoopHook, WatchedLoop
from napkin.planning.step.longest_step import LongestStep


def trainer_callback(
    *,
    run: StrPath | None = "auto",
    plan: bool = True,
    on: str | None = None,
    usd_per_hour: float | None = None,
    watts: float | None = None,
    say: Callable[[str], Any] | None = print,
) -> "TrainerHook":
    """A callback that plans, meters and reconciles the steps of transformers' `Trainer`.

    Args:
        run: a new folder for plan, metrics, measurement and report; "auto" is `runs/NAME` with the name of the
            trainer's output folder, numbered where that exists; None writes nothing.
        plan: whether the step is planned before the first one.
        on: the device, as the catalogue names it; None is that of the model.
        usd_per_hour: the price of all devices; None is the catalogue's, for a device that is in it.
        watts: the power of all devices; None is the catalogue's.
        say: called with the line of the plan, and at the end with the table and the verdict; None says nothing.

    Raises NapkinError where transformers is not installed.
    """
    try:
        from transformers import TrainerCallback  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise NapkinError("trainer_callback: transformers is not installed: pip install transformers") from None
    # Derived from the installed transformers, so that events of newer versions have a method.
    kind = type("NapkinCallback", (TrainerHook, TrainerCallback), {})
    return kind(run=run, plan=plan, on=on, usd_per_hour=usd_per_hour, watts=watts, say=say)


class TrainerHook(LoopHook):
    """The events of a `Trainer` that napkin listens to; `trainer_callback` makes one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._trainer: Any = None
        self._batches: Sequence[Any] = ()
        self._items: Any = None
        self._n_batches = 1
        self._restore = contextlib.ExitStack()
        self._generates = False
        """True if the trainer makes the inputs of its steps by generating completions and judging them."""

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._find_trainer()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._restore.close()
        self._find_trainer()
        module = model if isinstance(model, nn.Module) else self._trainer.model
        settings = {name: value for name, value in args.to_dict().items() if isinstance(value, (bool, int, float, str))}
        self.watched = WatchedLoop(
            module,
            program=type(self._trainer).__name__ if self._trainer is not None else "Trainer",
            run=self._folder(Path(args.output_dir or "trainer").name),
            steps=state.max_steps - state.global_step,
            n_devices=max(1, args.world_size * max(1, args.n_gpu)),
            settings={name: value for name, value in settings.items() if value != "" and "token" not in name},
            say=self._say,
            **self._options,
        )
        self.watched.n_workers = args.dataloader_num_workers
        if self._trainer is not None:
            self._restore.enter_context(_replaced(self._trainer, "get_batch_samples", self._watch_batches))
            # The loop around all steps; no event reports the error that ended it.
            self._restore.enter_context(_replaced(self._trainer, "_run_epoch", self._watch_errors))
            self._restore.enter_context(_replaced(self._trainer, "training_step", self._watch_step))
            self._generates = hasattr(self._trainer, "_generate_and_score_completions")
            if self._generates:
                self._restore.enter_context(_replaced(self._trainer, "_prepare_inputs", self._watch_generation))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._generates:
            self._batches = ()
        else:
            self._begin_step(self._batches)

    def _begin_step(self, batches: Sequence[Any]) -> None:
        watched = self.watched
        if watched is None:
            return
        size = signature_of(batches)
        if self._plans and batches and not watched.steps:
            watched.plan_by(
                functools.partial(self._count, batches), size=size, tokens=sum(map(_tokens_of_inputs, batches))
            )
            if not self._generates and not self._trainer.state.global_step:
                watched.longest_by(self._longest)
        watched.begin_step(size)

    def _count(self, batches: Sequence[Any]) -> Ledger:
        ledger = count_trainer_step(self._trainer, batches, self._items)
        if not self._generates:
            return ledger
        said = "of the training part of a step: generation is timed, not counted"
        return replace(ledger, assumption="; ".join(filter(None, (said, ledger.assumption))))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.watched is not None:
            self.watched.end_step(sum(map(_tokens_of_inputs, self._batches)))
        self._part_begin = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        names = {
            "loss": "loss",
            "learning_rate": "learning_rate",
            "grad_norm": "gradient_norm",
            "eval_loss": "validation_loss",
        }
        values = {names[name]: value for name, value in (logs or {}).items() if name in names}
        if self.watched is not None and values:
            self.watched.log(**values)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_part("evaluation")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_part("checkpoints")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._restore.close()
        self._trainer, self._batches, self._items = None, (), None
        self._end()

    def _longest(self, step_bytes: int, first_peak: int) -> LongestStep | None:
        trainer = self._trainer
        batches = LongestBatch(
            trainer.callback_handler.train_dataloader,
            per_step=trainer.args.gradient_accumulation_steps,
            n_steps=trainer.state.max_steps,
            count=lambda batches: count_trainer_step(trainer, batches, self._items).peak_bytes,
        )
        if not batches.is_order_of(self._batches):
            raise NapkinError("the order of the batches is not known before they are drawn")
        return batches.find(step_bytes, first_peak)

    def _end_part(self, name: str) -> None:
        if self.watched is not None and self._part_begin:
            now = time.perf_counter()
            self.watched.add_part(name, now - self._part_begin)
            self._part_begin = now

    def _find_trainer(self) -> None:
        """The trainer, which callbacks are not given: it is the caller of the event."""
        frame = sys._getframe(2)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if hasattr(caller, "training_step") and hasattr(caller, "callback_handler"):
                self._trainer = caller
                return
            frame = frame.f_back

    def _watch_batches(self, draw: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        drawn = draw(*args, **kwargs)
        if self.watched is not None:
            self.watched.add_waiting(time.perf_counter() - begin)
        self._batches, self._items = drawn[0], drawn[1]
        self._n_batches = len(drawn[0])
        return drawn

    def _watch_generation(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        inputs = prepare(*args, **kwargs)
        if self.watched is None or not self._trainer.model.training:
            return inputs
        self.watched.add_part("generation", time.perf_counter() - begin)
        if not self._batches:
            # The others of the step are as large: they are made of the same completions.
            self._begin_step([inputs] * self._n_batches)
        self._batches = (*self._batches, inputs)
        return inputs

    def _watch_errors(self, run_epoch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return run_epoch(*args, **kwargs)
        except BaseException as error:
            self._restore.close()
            if self.watched is not None:
                self.watched.abort_step(error)
                self._fail()
            raise

    def _watch_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except BaseException as error:
            if self.watched is not None:
                self.watched.abort_step(error)
            raise


def _tokens_of_inputs(inputs: Any) -> int:
    """Tokens of a micro-batch; prompts and completions are two tensors of trainers that generate."""
    if isinstance(inputs, dict) and "completion_ids" in inputs:
        return tokens_of(inputs["completion_ids"]) + tokens_of(inputs.get("prompt_ids"))
    return tokens_of(inputs)


@contextmanager
def _replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object by `by` in the block; `by` gets the method as its first argument."""
    method = getattr(owner, name, None)
    if method is None:
        yield
        return
    before = vars(owner).get(name)
    setattr(owner, name, functools.partial(by, method))
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def count_trainer_step(trainer: Any, batches: Sequence[Any], items: Any) -> Ledger:
    """Count one update of the trainer, on batches that it has drawn; `items` is the number that it divides losses by.

    Raises NapkinError where the step cannot be traced: with models that several processes share, and where the step
    asks for values that a trace does not have, as sampling does.
    """
    twins = Twins()
    originals = {name: value for name, value in vars(trainer).items() if isinstance(value, nn.Module)}
    module = trainer.accelerator.unwrap_model(trainer.model)
    modules: dict[int, nn.Module] = {}
    for original in (module, *originals.values()):
        inner = trainer.accelerator.unwrap_model(original)
        if id(inner) not in modules:
            modules[id(inner)] = twins.of_module(inner)
    model = modules[id(module)]
    optimizer = twins.of_optimizer(getattr(trainer.optimizer, "optimizer", trainer.optimizer))
    twin = copy.copy(trainer)
    for name, original in originals.items():
        setattr(twin, name, modules[id(trainer.accelerator.unwrap_model(original))])
    for name in ("get_batch_samples", "training_step", "_run_epoch"):
        vars(twin).pop(name, None)
    # State that a step adds to, such as metrics that are logged later.
    for name, value in vars(twin).items():
        if name.startswith("_") and isinstance(value, (dict, list)):
            with contextlib.suppress(Exception):
                setattr(twin, name, copy.deepcopy(value))
    twin.optimizer = optimizer
    twin.state, twin.control = copy.copy(trainer.state), copy.copy(trainer.control)
    twin._prepare_input = lambda data: data
    if "_prepare_inputs" in vars(twin):  # of a trainer that generates: the batches are what it has made
        twin._prepare_inputs = lambda data: data
    twin.current_gradient_accumulation_steps = len(batches)

    number = twins.of_batch(items)

    def step(micro_batches: Sequence[Any]) -> None:
        loss = torch.zeros(())
        for batch in micro_batches:
            loss += twin.training_step(model, dict(batch) if isinstance(batch, dict) else batch, number)
        _clip(twin, model)
        optimizer.step()
        model.zero_grad()

    with transformers_not_tracing():
        return count_fake_step(twins, model, step, batches, on_cuda=is_on_cuda(module.parameters()))


def _clip(trainer: Any, model: nn.Module) -> None:
    wanted = trainer.args.max_grad_norm
    if wanted is not None and wanted > 0:
        nn.utils.clip_grad_norm_(model.parameters(), wanted)
    elif hasattr(trainer, "_get_grad_norm"):
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
