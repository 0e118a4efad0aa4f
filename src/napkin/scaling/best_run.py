"""The best run of a sweep, the runs next to it, and whether it lies at the edge of what was tried."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from napkin.errors import NapkinError
from napkin.report.comparison import read_run
from napkin.runs.run_folder import is_run
from napkin.scaling.trials import Trial, Value


@dataclass(frozen=True)
class Standing:
    """A run with its figures at its end."""

    trial: Trial
    folder: Path
    loss: float | None
    """Nats per token: of the validation tokens, or without them of the last training steps; None where the run is not
    at its end."""
    step: int
    tokens: int
    seconds: float
    flops: float | None
    """Counted, of all its steps."""


@dataclass(frozen=True)
class Edge:
    """An axis whose best value is the smallest or the largest that was tried."""

    field: str
    value: Value
    is_smallest: bool

    def __str__(self) -> str:
        kind, other = ("smallest", "smaller") if self.is_smallest else ("largest", "larger")
        return f"the best {self.field}, {self.value}, is the {kind} that was tried: try {other} ones"


def standing(trial: Trial, folder: Path) -> Standing:
    """The figures of a run; a run that has not begun has none."""
    try:
        run = read_run(folder, training=False) if is_run(folder) else None
    except NapkinError:
        # It is damaged, which training it tells.
        run = None
    if run is None:
        return Standing(trial, folder, None, 0, 0, 0.0, None)
    found = run.summary
    loss = found.loss if found.validation_loss is None else found.validation_loss
    finished = loss if found.state == "finished" else None
    return Standing(trial, folder, finished, found.step, found.tokens, found.seconds, found.flops)


def ranked(standings: Sequence[Standing]) -> list[Standing]:
    """The runs that are at their end, the lowest loss first."""
    return sorted((each for each in standings if each.loss is not None), key=lambda each: each.loss or 0.0)


def edges(best: Trial, trials: Sequence[Trial]) -> list[Edge]:
    """The axes on which `best` is at the edge of all trials, failed ones too; of numbers alone.

    A loss that still falls towards an edge says nothing of where it ends. Seeds have no order.
    """
    found: list[Edge] = []
    for field, value in best.values.items():
        if field.endswith("_seed"):
            continue
        tried = {trial.values[field] for trial in trials}
        numbers = sorted(each for each in tried if isinstance(each, int | float) and not isinstance(each, bool))
        if len(tried) > 1 and len(numbers) == len(tried) and value in (numbers[0], numbers[-1]):
            found.append(Edge(field, value, is_smallest=value == numbers[0]))
    return found


def neighbours(best: Trial, trials: Sequence[Trial]) -> list[Trial]:
    """The runs of a grid that differ from `best` in one axis, by one step; of a list or a sample, none may."""
    found: list[Trial] = []
    for field, value in best.values.items():
        others = {each: item for each, item in best.values.items() if each != field}
        line = [trial for trial in trials if all(trial.values[field] == value for field, value in others.items())]
        ordered = sorted(line, key=lambda trial: _place(trial.values[field]))
        place = next(i for i, trial in enumerate(ordered) if trial.values[field] == value)
        found += [ordered[i] for i in (place - 1, place + 1) if 0 <= i < len(ordered)]
    return found


def _place(value: Value) -> tuple[bool, float, str]:
    is_number = isinstance(value, int | float)
    return (not is_number, float(value) if is_number else 0.0, str(value))


def as_json(standing: Standing) -> dict[str, object]:
    values = dataclasses.asdict(standing)
    return {"run": standing.trial.name, "values": standing.trial.values} | {
        name: values[name] for name in ("folder", "loss", "step", "tokens", "seconds", "flops")
    }
