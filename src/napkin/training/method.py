"""A kind of training: pre-training, supervised tuning, preferences, reward models, reinforcement learning.

A method opens what its recipe names and says what a step and an evaluation are. How its runs start, resume, keep their
accounts and end is the same for all: see `run.py` and `loop.py`. `Recipe.METHOD` names the class.
"""

import importlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from napkin.distributed.ranks import ALONE, Ranks
from napkin.planning.planner import Planner, plan_resolved
from napkin.planning.step.machine import Progress, ThisMachine
from napkin.planning.step.run_plan import Plan
from napkin.recipe.recipe import Recipe
from napkin.runs.run_folder import RunFolder
from napkin.training.loop import Callback, Preparation
from napkin.training.metered_step import MeteredStep


@dataclass
class Setting:
    """The ranks that prepare a run, and the functions to which they report."""

    ranks: Ranks = ALONE
    progress: Progress = lambda doing: None
    """Called with a description of each stage."""
    on_message: Callable[[str], None] = lambda message: None
    """Called with messages for the user."""
    planner: Planner = plan_resolved
    """Plans the steps of pre-training; a `SharedPlans` counts those of several runs that are alike once."""

    _machine: ThisMachine | None = None

    def machine(self, recipe: Recipe) -> ThisMachine:
        """This machine, divided among the ranks; examined once."""
        if self._machine is None:
            self._machine = ThisMachine(self.ranks, device=recipe.training.device)
        return self._machine


class Method(Preparation):
    """A kind of training, prepared for one run."""

    @classmethod
    @abstractmethod
    def begin(cls, recipe: Recipe, folder: Path, setting: Setting) -> "Method":
        """Open what the recipe of a new run names, and resolve it. `folder` does not exist yet.

        Raises NapkinError for files that are missing, damaged or do not belong together.
        """

    @classmethod
    @abstractmethod
    def reopen(cls, run: RunFolder, recipe: Recipe, setting: Setting) -> "Method":
        """Open what a run with that resolved recipe needs; ranks other than 0 may trust what rank 0 has verified."""

    @abstractmethod
    def make_plan(self, setting: Setting) -> Plan: ...

    @abstractmethod
    def step(self) -> MeteredStep:
        """The step that trains on a batch."""

    @abstractmethod
    def evaluation(self) -> Callback:
        """The callback that evaluates when an evaluation is due."""

    def callbacks(self) -> list[Callback]:
        return []

    def run_files(self) -> dict[str, bytes]:
        """Files of a new run beside its recipe and tokenizer, by name."""
        return {}

    def write_weights(self, checkpoints: Path) -> None:
        """Write the weights that a new run keeps only once, because they are not trained."""


def method_of(recipe: Recipe) -> type[Method]:
    """The class of a recipe's method. Only this one is imported."""
    module, _, name = recipe.METHOD.partition(":")
    return getattr(importlib.import_module(module), name)
