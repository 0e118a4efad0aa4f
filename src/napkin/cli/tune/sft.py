"""`napkin tune sft`."""

from dataclasses import dataclass

from napkin.cli.tune.tuning_command import TuningOptions, TuningTables, tune_by


@dataclass(frozen=True)
class SupervisedOptions(TuningOptions):
    """Fine-tune a model on conversations: it learns to say what the assistant says. Plans the run, trains it, meters
    it, and reconciles plan and measurement."""


def main(arguments: list[str]) -> int:
    """Fine-tune."""
    return tune_by(SupervisedOptions, TuningTables, "sft", arguments)
