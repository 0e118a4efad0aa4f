"""`napkin tune preference`."""

from dataclasses import dataclass, field

from napkin.cli.tune.tuning_command import TuningOptions, TuningTables, tune_by
from napkin.recipe.tuning_recipe import PreferenceConfig


@dataclass(frozen=True)
class PreferenceTables(TuningTables):
    """With how pairs are learned from."""

    preference: PreferenceConfig = field(default_factory=PreferenceConfig)


@dataclass(frozen=True)
class PreferenceOptions(TuningOptions):
    """Tune a model on preferences: a JSONL file with prompt, chosen and rejected per line, or for kto with prompt,
    completion and label. Plans the run, trains it, meters it, and reconciles plan and measurement."""


def main(arguments: list[str]) -> int:
    """Tune on preferences."""
    return tune_by(PreferenceOptions, PreferenceTables, "preference", arguments)
