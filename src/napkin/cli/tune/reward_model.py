"""`napkin tune reward-model`."""

from dataclasses import dataclass

from napkin.cli.tune.tuning_command import TuningOptions, TuningTables, tune_by


@dataclass(frozen=True)
class RewardModelOptions(TuningOptions):
    """Train a reward model: a number for each answer, from a JSONL file with prompt, chosen and rejected per line.
    Plans the run, trains it, meters it, and reconciles plan and measurement; on held-out pairs it says how far the
    model's probabilities can be taken at their word."""


def main(arguments: list[str]) -> int:
    """Train a reward model."""
    return tune_by(RewardModelOptions, TuningTables, "reward-model", arguments)
