"""Training steps of several states in turns, on the same batches: their losses, and the seconds that each step took."""

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from napkin.model.config import ModelConfig
from napkin.planning.step.kernel_choice import choose_kernels
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step import TrainState, build_train_state

LAST = 20


@dataclass
class Curve:
    """What a state came to, step by step."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def mean_loss(self, end: int) -> float:
        """Of the 20 steps before `end`."""
        return statistics.mean(self.losses[max(0, end - LAST) : end])

    @property
    def warm_seconds(self) -> list[float]:
        """Seconds of each step but the first two, which warm up."""
        return self.seconds[2:]


def state_of(model: ModelConfig, precision: Precision, steps: int, batch_size: int, **training: Any) -> TrainState:
    """A state with the forms that a run would choose where `training` names none."""
    settings = TrainingConfig(steps=steps, batch_size=batch_size, precision=precision.name, **training)
    recipe = Recipe(model=model, optimizer=OptimizerConfig(learning_rate=3e-3), training=settings)
    return build_train_state(ResolvedRecipe(choose_kernels(recipe, precision, ThisMachine()), precision))


def train_in_turns(states: Mapping[str, TrainState], batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Curve]:
    """A step of each state for each batch; which goes first changes from step to step."""
    curves, names = {name: Curve() for name in states}, list(states)
    for number, (tokens, targets) in enumerate(batches):
        for name in names if number % 2 else reversed(names):
            begin = time.perf_counter()
            loss, _ = states[name].step(number, tokens, targets)
            curves[name].losses.append(loss.item())
            curves[name].seconds.append(time.perf_counter() - begin)
        if number % LAST == LAST - 1:
            means = ", ".join(f"{name} {curve.mean_loss(number + 1):.4f}" for name, curve in curves.items())
            print(f"step {number + 1}: {means}", flush=True)
    return curves
