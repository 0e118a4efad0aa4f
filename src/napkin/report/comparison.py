"""Runs compared: a summary of each, and its loss over steps, tokens, FLOPs, seconds and dollars."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from napkin.errors import NapkinError
from napkin.files import read_bytes
from napkin.report.axes import AXES as AXES
from napkin.report.axes import Axis, Positions
from napkin.report.curves import Curve, smooth, smoothing_width
from napkin.report.overfitting import Overfitting, evaluations, lowest, overfitting
from napkin.runs.evaluation_file import Evaluation
from napkin.runs.run_record import RunRecord, read_run_record

Loss = Literal["training", "validation"]


@dataclass(frozen=True)
class RunSummary:
    """A run so far; None is unknown."""

    name: str
    folder: Path
    state: Literal["planned", "training", "stopped", "finished"]
    step: int
    steps: int | None
    """Planned."""
    tokens: int
    loss: float | None
    """Nats per token, averaged over the last logged steps as in the report's bold line."""
    validation_loss: float | None
    """The last one."""
    best_validation_loss: float | None
    best_validation_step: int | None
    overfitted: bool
    """Whether the validation loss rose from its lowest while the training loss fell: see `overfitting`."""
    seconds: float
    mfu: float | None
    """Of all steps together: FLOPs over summed seconds."""
    flops: float | None
    """By count, of all steps so far."""
    dollars: float | None
    """Of the seconds so far, at the price in the plan or the given one."""


class ComparedRun:
    """A run's summary, its curves, and what its losses were measured on."""

    def __init__(self, record: RunRecord, folder: Path, *, training: bool, usd_per_hour: float | None = None) -> None:
        metrics, plan = record.metrics, record.plan
        self.problems = [*record.problems]
        """A line for each problem of the run's metrics: damaged, displaced and missing lines."""
        if record.incomplete is not None and not training:
            self.problems.append(record.incomplete)
        last = metrics[-1] if metrics else None
        self.positions = Positions(record, usd_per_hour=usd_per_hour)
        self.losses: dict[Loss, Curve] = {
            "training": smooth(_figures(record, "loss"), smoothing_width(len(metrics))),
            "validation": _figures(record, "validation_loss"),
        }
        self.recipe = recipe_values(record.recipe)
        self.tokenizer = _tokenizer_of(folder)
        """The fingerprint of the run's tokenizer; None where it is not known."""
        self.evaluation: Evaluation | None = record.evaluation
        self.overfitting: Overfitting | None = overfitting(metrics)
        best = lowest(evaluations(metrics))
        step = last.step if last else 0
        self.summary = RunSummary(
            name=record.name,
            folder=folder,
            state=_state(step, plan.steps if plan else None, training),
            step=step,
            steps=plan.steps if plan else None,
            tokens=last.tokens if last else 0,
            loss=_last(self.losses["training"]),
            validation_loss=_last(self.losses["validation"]),
            best_validation_loss=best.loss if best else None,
            best_validation_step=best.step if best else None,
            overfitted=self.overfitting is not None,
            seconds=last.seconds if last else 0.0,
            mfu=record.mfu,
            flops=_last(self.along("flops")),
            dollars=_last(self.along("dollars")),
        )

    def along(self, axis: Axis) -> Curve:
        """The position of each logged step on an axis; empty if it is not known."""
        return self.positions.along(axis)

    def curve(self, axis: Axis, loss: Loss) -> tuple[Curve, Curve]:
        """The positions on the axis where the loss is known, and the losses there."""
        x, y = self.along(axis), self.losses[loss]
        known = ~np.isnan(y) if len(x) else np.empty(0, bool)
        return x[known], y[: len(x)][known]

    def loss_at(self, axis: Axis, position: float, loss: Loss = "training") -> float | None:
        """The loss at a position on the axis, interpolated between logged steps; None before the first and after the
        last."""
        x, y = self.curve(axis, loss)
        if not len(x) or not x[0] <= position <= x[-1] * (1 + 1e-9):
            return None
        return float(np.interp(position, x, y))


def read_run(folder: Path, *, training: bool, usd_per_hour: float | None = None) -> ComparedRun:
    """Read a run folder for comparison; raises NapkinError as `read_run_record` does."""
    return ComparedRun(read_run_record(folder), folder, training=training, usd_per_hour=usd_per_hour)


def find_runs(folders: Sequence[str]) -> list[Path]:
    """The run folders among `folders` and directly in them, in their order.

    Raises NapkinError for a folder that is not a run and contains none.
    """
    found: list[Path] = []
    for folder in map(Path, folders):
        runs = [folder] if _is_run(folder) else sorted(path.parent for path in folder.glob("*/recipe.toml"))
        if not runs:
            raise NapkinError(f"'{folder}' is not a run and contains none: name folders that `napkin train` made")
        found += (run for run in runs if run not in found)
    return found


def equal_points(runs: Sequence[ComparedRun], axis: Axis, n: int) -> list[float]:
    """About `n` round positions on an axis up to the end of the longest run, and the end of each run.

    Raises NapkinError if the axis is not known for any run.
    """
    ends = [float(run.along(axis)[-1]) for run in runs if len(run.along(axis))]
    if not ends or max(ends) <= 0:
        way_out = ": give a price with --usd-per-hour" if axis == "dollars" else ": train them first"
        raise NapkinError(f"none of these runs has {axis} to compare over{way_out}")
    end = max(ends)
    interval = _round_up(end / n)
    positions = {interval * number for number in range(1, math.floor(end / interval) + 1)} | set(ends)
    return sorted(positions)


def recipe_values(text: str) -> dict[str, Any]:
    """The values of a recipe by "table.name"; empty where it is not TOML."""
    try:
        recipe = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}
    return dict(_flatten(recipe, ""))


def _flatten(values: dict[str, Any], prefix: str):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _tokenizer_of(folder: Path) -> str | None:
    try:
        return msgspec.json.decode(read_bytes(folder / "tokenizer.json"), type=_TokenizerFile).fingerprint
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class _TokenizerFile(msgspec.Struct):
    fingerprint: str


def _is_run(folder: Path) -> bool:
    return (folder / "recipe.toml").is_file()


def _state(step: int, steps: int | None, training: bool) -> Literal["planned", "training", "stopped", "finished"]:
    if training:
        return "training"
    if steps is not None and step >= steps:
        return "finished"
    return "stopped" if step else "planned"


def _figures(record: RunRecord, name: str) -> Curve:
    return np.array([getattr(logged, name) for logged in record.metrics], dtype=np.float64)


def _last(values: Curve) -> float | None:
    known = values[~np.isnan(values)]
    return float(known[-1]) if len(known) else None


def _round_up(interval: float) -> float:
    """The smallest of ..., 1, 2, 5, 10, 20, ... that is not less."""
    decade = 10.0 ** math.floor(math.log10(interval))
    return next(digit * decade for digit in (1, 2, 5, 10) if digit * decade >= interval * (1 - 1e-9))
