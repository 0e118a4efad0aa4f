"""`napkin tune rl`."""

from dataclasses import dataclass, field
from typing import Annotated

from napkin.cli.options import INLINED
from napkin.cli.tune.tuning_command import TuningOptions, TuningTables, tune_by
from napkin.recipe.tuning_recipe import ReinforcementConfig


@dataclass(frozen=True)
class ReinforcementTables(TuningTables):
    """The tables of a recipe of reinforcement learning."""

    rl: ReinforcementConfig = field(default_factory=ReinforcementConfig)


@dataclass(frozen=True)
class ReinforcementOptions(TuningOptions):
    """Tune a model on rewards of its own answers, to tasks of an environment or to prompts of a file. Answers held-out
    tasks greedily when an evaluation is due, and keeps answers with their rewards in the run's folder."""

    recipe: Annotated[ReinforcementTables, INLINED]


def main(arguments: list[str]) -> int:
    """Reinforcement learning."""
    return tune_by(ReinforcementOptions, ReinforcementTables, "rl", arguments)
