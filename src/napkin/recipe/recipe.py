"""The recipe: everything that is chosen for a run; as a TOML file, it is enough to repeat the run.

Does not import torch: the command line reads these classes for its help.
"""

import dataclasses
from dataclasses import dataclass, field
from fractions import Fraction
from math import floor
from typing import ClassVar

from napkin.bounds import refuse_outside
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.optim.registry import SCHEDULES, Schedule
from napkin.recipe.data_config import DataConfig, shortened_curriculum
from napkin.recipe.training_config import (
    MOST_TOKENS_PER_STEP,
    SCHEDULE_OPTIONS,
    OptimizerConfig,
    ParallelismConfig,
    TrackingConfig,
    TrainingConfig,
    fields_of,
)

SCHEDULE_FIELDS = {"optimizer.warmup_steps", "optimizer.decay_steps"}
"""Fields that are counted in steps, and have to fit into training.steps."""


@dataclass(frozen=True)
class Recipe:
    """Everything that is chosen for a run."""

    METHOD: ClassVar[str] = "napkin.training.pretraining:Pretraining"
    """The class that trains by it, a `napkin.training.method.Method`: module and name, imported when it is needed."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        refuse_outside("model", self.model)
        steps = self.training.steps
        if self.warmup_steps >= steps:
            raise NapkinError(
                f"optimizer.warmup_steps {self.warmup_steps} does not fit into training.steps {steps}: "
                f"use 0 to {steps - 1}, or leave it out"
            )
        try:
            _ = self.schedule
        except NapkinError as error:
            raise NapkinError(f"optimizer.{error}") from None
        if self.tokens_per_step > MOST_TOKENS_PER_STEP:
            raise NapkinError(
                f"training.batch_size {self.training.batch_size} times model.context_length "
                f"{self.model.context_length} is {self.tokens_per_step} tokens per step: "
                f"use numbers whose product is at most {MOST_TOKENS_PER_STEP}"
            )

    @property
    def warmup_steps(self) -> int:
        chosen = self.optimizer.warmup_steps
        return min(50, self.training.steps // 10) if chosen is None else chosen

    @property
    def schedule(self) -> Schedule:
        kind = SCHEDULES[self.optimizer.schedule]
        chosen = {name: getattr(self.optimizer, name) for name in SCHEDULE_OPTIONS & fields_of(kind)}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        return kind(self.warmup_steps, self.training.steps, **chosen)

    def of_steps(self, steps: int) -> "Recipe":
        """The recipe of so many steps. In a shorter run, all that is counted in steps and shapes the learning rate or
        the mixture is shorter in proportion: warm-up, decay, the phases of a curriculum. A longer run keeps them.

        >>> Recipe(optimizer=OptimizerConfig(warmup_steps=50)).of_steps(100).warmup_steps
        5
        """
        factor = min(Fraction(1), Fraction(steps, self.training.steps))

        def shorter(chosen: int | None) -> int | None:
            return None if chosen is None else floor(factor * chosen)

        optimizer = dataclasses.replace(
            self.optimizer,
            warmup_steps=shorter(self.optimizer.warmup_steps),
            decay_steps=shorter(self.optimizer.decay_steps),
        )
        curriculum = shortened_curriculum(self.data.curriculum, factor)
        return dataclasses.replace(
            self,
            data=dataclasses.replace(self.data, curriculum=curriculum),
            optimizer=optimizer,
            training=dataclasses.replace(self.training, steps=steps),
        )

    def with_steps(self, steps: int) -> "Recipe":
        """The recipe of so many steps, in which nothing else changes; where its schedule does not fit into them,
        `of_steps`."""
        try:
            return dataclasses.replace(self, training=dataclasses.replace(self.training, steps=steps))
        except NapkinError:
            return self.of_steps(steps)

    @property
    def tokens_per_step(self) -> int:
        return self.training.batch_size * self.model.context_length
