"""Runs compared: a summary of each, its loss over steps, tokens, FLOPs, seconds and dollars, and a ranking in words of
those that can be compared; in the terminal, or on one self-contained page.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from napkin.accounting.quantities import format_figure
from napkin.errors import NapkinError
from napkin.files import atomic_write_text, read_bytes, refuse_unmarked
from napkin.report.charts import Chart, Charts, Line, Table, charts_of
from napkin.report.headline import recipe_values
from napkin.report.overfitting import Curve, Overfitting, evaluations, lowest, overfitting, smooth, smoothing_width
from napkin.report.templates import UPLOT, UPLOT_STYLE, read_asset, render, scripts
from napkin.report.xy_picture import AXES as AXES
from napkin.report.xy_picture import COLOURS, LABELS, UNITS, Axis, Positions
from napkin.runs.accounting_files import Evaluation
from napkin.runs.run_record import RunRecord, read_run_record
from napkin.units import format_seconds, format_share, format_three_digits

Loss = Literal["training", "validation"]


@dataclass(frozen=True)
class RunSummary:
    """A run so far; None is unknown."""

    name: str
    folder: Path
    state: Literal["planned", "training", "stopped", "finished"]
    step: int
    steps: int | None
    """Planned steps."""
    tokens: int
    loss: float | None
    """Nats per token, averaged over the last logged steps as in the report's bold line."""
    validation_loss: float | None
    """The last validation loss."""
    best_validation_loss: float | None
    best_validation_step: int | None
    overfitted: bool
    """True if the validation loss rose from its lowest while the training loss fell: see `overfitting`."""
    seconds: float
    mfu: float | None
    """MFU of all steps together: FLOPs over summed seconds."""
    flops: float | None
    """FLOPs of all steps so far, by count."""
    dollars: float | None
    """Price of the seconds so far, by the plan or the given one."""


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
        """The fingerprint of the run's tokenizer; None if unknown."""
        self.evaluation: Evaluation | None = record.evaluation
        self.overfitting: Overfitting | None = overfitting(metrics)
        best = lowest(evaluations(metrics))
        step, steps = last.step if last else 0, plan.steps if plan else None
        state = "finished" if steps is not None and step >= steps else "stopped" if step else "planned"
        self.summary = RunSummary(
            name=record.name,
            folder=folder,
            state="training" if training else state,
            step=step,
            steps=steps,
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
        is_run = (folder / "recipe.toml").is_file()
        runs = [folder] if is_run else sorted(path.parent for path in folder.glob("*/recipe.toml"))
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
    # The smallest of ..., 1, 2, 5, 10, 20, ... that is not less.
    decade = 10.0 ** math.floor(math.log10(end / n))
    interval = next(digit * decade for digit in (1, 2, 5, 10) if digit * decade >= end / n * (1 - 1e-9))
    positions = {interval * number for number in range(1, math.floor(end / interval) + 1)} | set(ends)
    return sorted(positions)


def _tokenizer_of(folder: Path) -> str | None:
    try:
        return msgspec.json.decode(read_bytes(folder / "tokenizer.json"), type=_TokenizerFile).fingerprint
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class _TokenizerFile(msgspec.Struct):
    fingerprint: str


def _figures(record: RunRecord, name: str) -> Curve:
    return np.array([getattr(logged, name) for logged in record.metrics], dtype=np.float64)


def _last(values: Curve) -> float | None:
    known = values[~np.isnan(values)]
    return float(known[-1]) if len(known) else None


@dataclass(frozen=True)
class Ranking:
    """Runs in the order of a figure that compares them."""

    by: Literal["validation loss", "bits per byte"] | None
    """The figure that ranks the runs; None where nothing compares them: `ranked` are then those with a validation loss,
    in the order of the files that they were validated on."""
    ranked: tuple[ComparedRun, ...]
    """Runs from the best on."""
    others: tuple[ComparedRun, ...]
    """Runs that lack the figure."""
    statements: tuple[str, ...]
    """Sentences on what the comparison shows."""


def rank(runs: Sequence[ComparedRun]) -> Ranking:
    """Rank runs by their lowest validation loss or, where their losses are not of the same tokens, by bits per byte."""
    validated = [run for run in runs if run.summary.best_validation_loss is not None]
    evaluated = [(run, run.evaluation) for run in runs if run.evaluation is not None]
    # Two texts of the same length that two compressors compress equally are taken to be the same.
    texts = {(found.bytes, found.xz_bits_per_byte, found.gzip_bits_per_byte) for _, found in evaluated}
    by: Literal["validation loss", "bits per byte"] | None = None
    if not (obstacle := _obstacle(validated)):
        ranked = sorted(validated, key=_best_loss)
        by = "validation loss" if ranked else None
        lead = [*_validation_leaders(ranked), *_training_leader(ranked)]
    elif len(evaluated) > 1 and len(texts) == 1:
        by = "bits per byte"
        evaluated.sort(key=lambda each: each[1].bits_per_byte)
        ranked = [run for run, _ in evaluated]
        best, found = evaluated[0]
        bits = format_three_digits(found.bits_per_byte)
        lead = [
            f"{obstacle} The runs are compared by bits per byte of the same text instead.",
            f"{best.summary.name} has the fewest bits per byte, {bits} at step {found.step:,}.",
        ]
    else:
        ranked = sorted(validated, key=lambda run: (str(_measured_on(run)), _best_loss(run)))
        bits = "`napkin evaluate` gives bits per byte, which compare the runs where they are of the same text."
        lead = [f"{obstacle} {bits}"]
    others = [run for run in runs if run not in ranked]
    lead += [f"{run.summary.name} is overfitted: {run.overfitting}." for run in runs if run.overfitting]
    if others:
        lacks = f"{'has' if len(others) == 1 else 'have'} no {by or 'validation loss'} and cannot be ranked"
        lead.append(f"{_names(others)} {lacks}: a training loss does not replace it.")
    return Ranking(by, tuple(ranked), tuple(others), tuple(lead))


def differences(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """The values in which the recipes differ, by "table.name"; "–" for a value that is not set."""
    names = {name: None for run in runs for name in run.recipe}

    def text(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:g}"
        return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    shown = {name: [text(run.recipe.get(name)) for run in runs] for name in names}
    return {name: values for name, values in shown.items() if len(set(values)) > 1}


def _validation_leaders(ranked: list[ComparedRun]) -> list[str]:
    """The leaders by validation loss. An overfitted run leads with weights that it no longer has at its end."""
    if len(ranked) < 2:
        return []
    best = ranked[0].summary
    equal = [run for run in ranked if run.summary.best_validation_loss == best.best_validation_loss]
    if len(equal) > 1:
        return [
            f"{_names(equal)} have the same lowest validation loss, {best.best_validation_loss:.4f} nats per token."
        ]
    lead = f"{best.best_validation_loss:.4f} nats per token at step {best.best_validation_step:,}"
    at_end = min(ranked, key=lambda run: run.summary.validation_loss or 0.0).summary
    end = f"the lowest validation loss at the end is that of {at_end.name}, {at_end.validation_loss:.4f}"
    if ranked[0].overfitting:
        return [
            f"{best.name} came to the lowest validation loss, {lead}, but not with its last weights: "
            f"{best.validation_loss:.4f} at its end; {end}."
        ]
    return [f"{best.name} has the lowest validation loss, {lead}{'' if at_end is best else f'; {end}'}."]


def _training_leader(ranked: list[ComparedRun]) -> list[str]:
    """A warning where the lowest training loss is that of another run."""
    known = [run for run in ranked if run.summary.loss is not None]
    if len(known) < 2:
        return []
    lowest = min(known, key=lambda run: run.summary.loss or 0.0)
    if lowest is ranked[0]:
        return []
    return [
        f"The lowest training loss is that of {lowest.summary.name}, {lowest.summary.loss:.4f}. It does not make that "
        "run the best: it says how well a model predicts the text that it was trained on."
    ]


def _obstacle(validated: list[ComparedRun]) -> str:
    """Why the validation losses cannot be compared; "" if they can."""
    if len({_measured_on(run) for run in validated}) < 2:
        return ""
    if len({run.tokenizer for run in validated}) > 1:
        return "The losses cannot be compared: the runs have different tokenizers, and a loss is per token."
    return "The losses cannot be compared: the runs were validated on different token files."


def _measured_on(run: ComparedRun) -> tuple[str | None, str]:
    return run.tokenizer, str(run.recipe.get("data.validation"))


def _best_loss(run: ComparedRun) -> float:
    best = run.summary.best_validation_loss
    assert best is not None
    return best


def _names(runs: list[ComparedRun]) -> str:
    names = [run.summary.name for run in runs]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


_SHADES = ("blue", "vermilion", "green", "orange", "purple", "sky", "grey", "yellow")
MOST_RUNS = len(_SHADES)
GENERATOR = b'<meta name="generator" content="napkin runs">'
_POINTS = 1200
"""Most points per run: the page of eight runs stays well below a megabyte."""


def write_comparison(
    path: Path, runs: Sequence[ComparedRun], *, loss: Loss, axis: Axis, points: Sequence[float]
) -> Path:
    """Write the page to `path`, replacing an earlier one, and return the path.

    Runs are in the order of their lowest validation loss, those without one last. `loss` is that of the table at equal
    points, and `axis` the one that charts show first. Raises NapkinError for more runs than there are distinct colours,
    and where `path` is anything but such a page.
    """
    refuse_unmarked(path, GENERATOR, "a page that `napkin runs` wrote")
    if len(runs) > MOST_RUNS:
        raise NapkinError(f"a page shows at most {MOST_RUNS} runs, {len(runs)} are given: name fewer")
    ranking = rank(runs)
    ordered = [*ranking.ranked, *ranking.others]
    rows = _ranked_rows(ordered)
    charts = comparison_charts(ordered, axis)
    page = render(
        "comparison.html",
        colours=COLOURS,
        title=", ".join(run.summary.name for run in ordered),
        # The headings of the page by their anchors, in order.
        sections={
            "summary": f"Runs by {ranking.by}" if ranking.by else "Runs",
            **{name: f"{name.capitalize()} loss" for name in charts.by_name},
            "differences": "What differs between the recipes",
            "points": f"{loss.capitalize()} loss at equal {LABELS[axis]}",
        },
        statements=ranking.statements,
        warnings=[problem for run in ordered for problem in run.problems],
        runs=rows,
        tables=[part for part in (rows[: len(ranking.ranked)], rows[len(ranking.ranked) :]) if part],
        charts=charts,
        chart_style=read_asset(UPLOT_STYLE),
        differences=differences(ordered),
        axis=LABELS[axis],
        points=point_rows(ordered, axis, points, loss),
        scripts=scripts(UPLOT, "format.js", "charts.js"),
    )
    atomic_write_text(path, page, overwrite=True)
    return path


def comparison_charts(runs: Sequence[ComparedRun], axis: Axis) -> Charts:
    """A chart of the validation losses and one of the training losses, with a line per run."""
    tables = [Table(run.positions, {str(loss): curve for loss, curve in run.losses.items()}, _POINTS) for run in runs]

    def lines(loss: Loss) -> tuple[Line, ...]:
        style = "points" if loss == "validation" else "line"
        return tuple(
            Line(run.summary.name + (", overfitted" if run.overfitting else ""), loss, shade, "loss", style, table)
            for table, (shade, run) in enumerate(zip(_SHADES, runs, strict=False))
        )

    description = "Line chart: {} losses of the runs; a table on this page lists them.".format
    return charts_of(
        [
            Chart("validation", description("validation"), lines("validation"), 320, False),
            Chart("training", description("training"), lines("training"), 260, False),
        ],
        tables,
        axis,
    )


def summary_rows(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """The list of runs, one row each; a column without any figure is left out."""
    rows = [_summary_cells(run) for run in runs]
    if all(row["lowest"] in (row["validation"], "–") for row in rows):
        # The last validation loss is the lowest of each run.
        rows = [{name: cell for name, cell in row.items() if name not in ("lowest", "at step")} for row in rows]
    absent = {name for name in (rows[0] if rows else ()) if name != "run" and all(row[name] == "–" for row in rows)}
    return [{name: cell for name, cell in row.items() if name not in absent} for row in rows]


def point_rows(runs: Sequence[ComparedRun], axis: Axis, points: Sequence[float], loss: Loss) -> list[list[str]]:
    """The table at equal points: the position, and each run's loss there; points where no loss is known are left
    out."""
    rows = [
        [format_figure(point, UNITS[axis]), *(_loss(run.loss_at(axis, point, loss)) for run in runs)]
        for point in points
    ]
    return [row for row in rows if any(figure != "–" for figure in row[1:])]


def _summary_cells(run: ComparedRun) -> dict[str, Any]:
    """A run's row of the list, formatted."""
    summary, best_step = run.summary, run.summary.best_validation_step
    return {
        "run": summary.name,
        "state": summary.state,
        "step": f"{summary.step:,}"
        + (f" of {summary.steps:,}" if summary.steps and summary.step < summary.steps else ""),
        "tokens": format_figure(summary.tokens, "count"),
        "lowest": _loss(summary.best_validation_loss),
        "at step": "–" if best_step is None else f"{best_step:,}",
        "validation": _loss(summary.validation_loss),
        "loss": _loss(summary.loss),
        "bits per byte": "–" if run.evaluation is None else format_three_digits(run.evaluation.bits_per_byte),
        "time": format_seconds(summary.seconds),
        "MFU": "–" if summary.mfu is None else format_share(summary.mfu),
        "FLOPs": format_figure(summary.flops, "FLOP"),
        "dollars": format_figure(summary.dollars, "USD"),
    }


def _ranked_rows(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """The list of runs for the page: losses first, and states only if a run is not finished."""
    first = ("run", "lowest", "at step", "validation", "loss", "bits per byte")
    left_out = {"state"} if all(run.summary.state == "finished" for run in runs) else set()
    rows = []
    for shade, run, cells in zip(_SHADES, runs, summary_rows(runs), strict=False):
        names = [*(name for name in first if name in cells), *(name for name in cells if name not in first)]
        shown = {name: cells[name] for name in names if name not in left_out}
        note = f"overfitted after step {run.overfitting.best.step:,}" if run.overfitting else ""
        rows.append({"colour": shade, "note": note, **shown})
    return rows


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
