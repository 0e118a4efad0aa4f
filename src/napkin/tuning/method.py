"""What a way of tuning gives to the loop: its data, its step, its evaluation, its plan."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from napkin.chats.chat_encoder import ChatEncoder
from napkin.distributed.ranks import Ranks
from napkin.planning.step.machine import Machine, Progress
from napkin.planning.step.run_plan import Plan
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.tuning_recipe import TuningRecipe
from napkin.tokenizer.base import Tokenizer
from napkin.training.loop import Callback
from napkin.training.metered_step import MeteredStep


@dataclass(frozen=True)
class TuningContext:
    """What a method is made of, whether a run begins or is resumed."""

    recipe: TuningRecipe
    """Resolved: [model] is that of the start."""
    tokenizer: Tokenizer
    encoder: ChatEncoder
    """How conversations become tokens."""
    folder: Path
    """The run's: made after the method, which may look for files of its own there later."""
    ranks: Ranks
    progress: Progress
    on_message: Callable[[str], None]


class Method(ABC):
    """A way of tuning."""

    @property
    @abstractmethod
    def checksum(self) -> str:
        """Of its data, which a checkpoint remembers."""

    @abstractmethod
    def batch(self, number: int) -> Any:
        """The batch of step `number`, counted from 0: always the same one."""

    @abstractmethod
    def step(self) -> MeteredStep:
        """What trains on a batch."""

    @abstractmethod
    def evaluation(self) -> Callback:
        """What evaluates when an evaluation is due."""

    def callbacks(self) -> list[Callback]:
        """Others of its own, called after the loop's."""
        return []

    def plan(self, resolved: ResolvedRecipe, machine: Machine, progress: Progress) -> Plan | None:
        """The plan of its steps; None without one."""
        return None
