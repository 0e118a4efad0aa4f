"""Infinity or NaN in a step: the module where it first occurs, and its batch, saved for inspection."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.files import atomic_write_text
from napkin.runs.metrics import History
from napkin.runs.run_folder import RunFolder, lower_learning_rate
from napkin.tensors import numbers_of
from napkin.train_step.step import TrainState

MOST_KEPT = 20
"""The most batches that are saved per run."""


class Verdict:
    """The loss and gradient norm of a step as numbers, and whether both are finite.

    Reading them is the one time in a step that the host waits for a GPU: a step is not undone, so its update has to
    wait for them.
    """

    loss: float
    gradient_norm: float

    def __init__(self, before_waiting: Callable[[], None] = lambda: None) -> None:
        """`before_waiting` starts copies of other figures, which are then there when these are."""
        self._before_waiting = before_waiting

    def __call__(self, loss: Tensor, norm: Tensor) -> bool:
        """Store both numbers, and return whether they are finite."""
        self._before_waiting()
        self.loss, self.gradient_norm = numbers_of(loss, norm)
        return self.is_fit

    @property
    def is_fit(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def skip_or_stop(
    train_state: TrainState,
    history: History,
    run: RunFolder,
    number: int,
    batch: Mapping[str, Tensor],
    verdict: Verdict,
    repeat: Callable[[], Tensor],
    on_message: Callable[[str], None],
) -> str:
    """Find the source, and save the batch, of step `number` (counted from 0), whose update was skipped.

    `repeat` repeats the step without an update and returns its loss. Returns the source if the run continues, by the
    recipe's `on_non_finite`; raises NapkinError if it stops.
    """
    ranks, training = train_state.parallel_model.ranks, train_state.recipe.training
    # The search repeats a step and stops early, which ranks cannot do together.
    source = find_source(train_state, repeat) if ranks.world_size == 1 else "on one of the ranks"
    # Enough to repeat the step; JSON has no infinity and no NaN.
    story = {
        "step": number + 1,
        "batch": number,
        "loss": str(verdict.loss),
        "gradient_norm": str(verdict.gradient_norm),
        "first_non_finite": source,
        "learning_rate": train_state.learning_rate(number),
        "seeds": {name: value for name, value in dataclasses.asdict(training).items() if "seed" in name},
        "precision": train_state.precision.name,
    }
    kept = keep_batch(run.path / "non-finite", number + 1, batch, story) if ranks.is_rank_zero else None
    what = (
        f"step {number + 1}: the loss is {verdict.loss}, the gradient's norm {verdict.gradient_norm}, "
        f"the first such number {source}"
    )
    look = f"; its batch is in '{kept}'" if kept else ""
    if training.on_non_finite == "skip" and history.skipped_in_a_row < training.most_skipped:
        history.skipped += 1
        history.skipped_in_a_row += 1
        on_message(f"{what}: its update is skipped ({history.skipped_in_a_row} in a row){look}")
        return source
    other_way = (
        f"raise most_skipped, which is {training.most_skipped}"
        if training.on_non_finite == "skip"
        else 'pass over such steps with on_non_finite = "skip"'
    )
    raise NapkinError(f"{what}: {lower_learning_rate(run.path, otherwise=f', or {other_way},')}{look}")


def find_source(train_state: TrainState, repeat: Callable[[], Tensor]) -> str:
    """Repeat a step's loss and gradient with hooks, and return where the first non-finite number occurs.

    No update is made. The result completes the sentence "the first such number is ...".
    """
    for name, parameter in train_state.model.named_parameters():
        if not _is_finite(parameter):
            return f"in the weights '{name}' themselves"
    sources: list[str] = []
    with _watched(train_state.model, sources.append):
        try:
            loss = repeat()
        except _Found:
            train_state.optimizer.zero_grad(set_to_none=True)
        else:
            return "in the loss" if not _is_finite(loss) else "in the gradient's norm, all gradients being finite"
    return sources[0]


def keep_batch(folder: Path, step: int, batch: Mapping[str, Tensor], story: dict[str, Any]) -> Path | None:
    """Write `folder`/step-XXXXXXXX.safetensors, which holds the batch's tensors, and .json
    beside it; the first's path.

    None where `MOST_KEPT` exist already, or writing fails: that must not stop the run.
    """
    path = folder / f"step-{step:08d}.safetensors"
    try:
        folder.mkdir(exist_ok=True)
        if not path.exists() and len(list(folder.glob("*.safetensors"))) >= MOST_KEPT:
            return None
        save_file({name: tensor.cpu().contiguous() for name, tensor in batch.items()}, path)
        atomic_write_text(path.with_suffix(".json"), json.dumps(story, indent=2) + "\n", overwrite=True)
    except Exception:
        return None
    return path


class _Found(Exception):
    """Ends the repeated step at the first non-finite number."""


@contextmanager
def _watched(model: nn.Module, tell: Callable[[str], None]) -> Iterator[None]:
    names = {module: name or "the model" for name, module in model.named_modules()}

    def look_at_output(module: nn.Module, _: Any, output: Any) -> None:
        if any(not _is_finite(tensor) for tensor in _tensors(output)):
            tell(f"in the output of '{names[module]}', {type(module).__name__}")
            raise _Found

    def look_at_gradient(name: str) -> Callable[[Tensor], None]:
        def look(parameter: Tensor) -> None:
            if parameter.grad is not None and not _is_finite(parameter.grad):
                tell(f"in the gradient of '{name}', all modules' outputs being finite")
                raise _Found

        return look

    # Forward hooks run in order of computation, gradient hooks from the last layer down: the first hit is the source.
    hooks = [module.register_forward_hook(look_at_output) for module in names]
    hooks += [
        parameter.register_post_accumulate_grad_hook(look_at_gradient(name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for each in output:
            yield from _tensors(each)


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
