"""The data of a page's charts, which charts.js draws with uPlot: thinned curves, lines and axes, as one JSON object;
and the charts of the page of one run, with one for each further figure that a tuned run logs.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from markupsafe import Markup

from napkin.accounting.quantities import format_figure
from napkin.report.headline import sample_of
from napkin.report.overfitting import Curve, smooth, smoothing_width, thin
from napkin.report.xy_picture import AXES, LABELS, UNITS, Axis, Positions, unit_and_label
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_record import RunRecord
from napkin.units import format_bytes, format_count, format_seconds, format_share, format_three_digits

Unit = Literal["loss", "number", "count", "bytes", "share", "tokens/s"]


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    label: str
    column: str
    """Name of the curve in its table."""
    colour: str
    unit: Unit
    style: Literal["line", "faint", "bold", "dashed", "points"] = "line"
    table: int = 0
    """Index of the table: on a page that compares runs, each run has one."""
    right: bool = False
    """True if the line has the axis on the right."""


@dataclass(frozen=True)
class Chart:
    """A chart; its lines share the page's horizontal axis."""

    name: str
    """Unique on the page."""
    description: str
    """A description for readers who do not see the chart."""
    lines: tuple[Line, ...]
    height: int
    """Height in pixels."""
    from_zero: bool
    """True if the vertical axes begin at 0; otherwise they are logarithmic where the values span more than a factor of
    3."""


@dataclass(frozen=True)
class Charts:
    """The scripts, styles and data by which a template shows charts."""

    by_name: dict[str, Chart]
    axes: Sequence[tuple[Axis, str]]
    """Axes to choose from, with their names."""
    axis: Axis
    """The one that is shown first."""
    data: Markup
    """JSON in which no "<" occurs, for the inside of a <script> element."""


class Table:
    """Curves of one run at the same logged steps, thinned together to at most `limit` points."""

    def __init__(self, positions: Positions, curves: Mapping[str, Curve], limit: int) -> None:
        known = {name: curve for name, curve in curves.items() if not np.all(np.isnan(curve))}
        steps = positions.along("steps")
        kept = thin([*known.values()] or [steps], limit)
        self.curves = {name: _rounded(curve[kept]) for name, curve in known.items()}
        along = {axis: positions.along(axis) for axis in AXES}
        self.ends = {axis: float(values[-1]) for axis, values in along.items() if len(values)}
        self.positions = {
            axis: _rounded(values[kept]) if axis == "steps" else _relative(values[kept], steps[kept])
            for axis, values in along.items()
            if len(values)
        }


def charts_of(charts: Sequence[Chart], tables: Sequence[Table], axis: Axis) -> Charts:
    """Charts and their tables as JSON; lines whose curve is not known are left out, and so are charts without lines."""
    shown = [
        replace(chart, lines=tuple(line for line in chart.lines if line.column in tables[line.table].curves))
        for chart in charts
    ]
    shown = [chart for chart in shown if chart.lines]
    ends = {each: max((table.ends.get(each, 0.0) for table in tables), default=0.0) for each in AXES}
    axes: list[Axis] = [each for each in AXES if ends[each] > 0]
    axis = axis if axis in axes or not axes else axes[0]
    shown_axes = {}
    for each in axes:
        scale, label = unit_and_label(each, ends[each])
        shown_axes[each] = {"name": LABELS[each], "label": label, "scale": scale, "unit": UNITS[each]}
    content = {
        "axis": axis,
        "axes": shown_axes,
        "tables": [{"positions": table.positions, "curves": table.curves} for table in tables],
        "charts": {chart.name: asdict(chart) for chart in shown},
    }
    names: list[tuple[Axis, str]] = [(each, LABELS[each]) for each in axes]
    return Charts({chart.name: chart for chart in shown}, names, axis, as_data(content))


def as_data(content: Any) -> Markup:
    """Content as JSON for the inside of a <script> element, which no string in it can end."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _rounded(values: Curve) -> list[float | int | None]:
    """Six digits are more than a chart can show, and their text is short."""
    return [
        None
        if not math.isfinite(value)
        else int(value)
        if value == int(value) and abs(value) < 2**53
        else float(f"{value:.6g}")
        for value in values.tolist()
    ]


def _relative(values: Curve, steps: Curve) -> list[float | int | None] | float:
    """Positions on another axis: a number if they are that multiple of the steps, as tokens and FLOPs mostly are."""
    if len(values) and steps[-1] > 0:
        times = float(values[-1] / steps[-1])
        if np.allclose(values, steps * times, rtol=1e-9, atol=0.0):
            return times
    return _rounded(values)


HELD_OUT = "held-out "
"""Begins the names of an evaluation's figures, which are points in the chart of the same figure."""


def figure_curves(metrics: Sequence[StepMetrics]) -> dict[str, Curve]:
    """The further figures of all logged steps by name; NaN where a step has none."""
    names = dict.fromkeys(name for logged in metrics for name in logged.figures or {})
    # numpy makes NaN of None.
    return {
        name: np.array([(logged.figures or {}).get(name) for logged in metrics], dtype=np.float64) for name in names
    }


def figure_charts(curves: Mapping[str, Curve]) -> list[Chart]:
    """A chart for each figure that varies, those of evaluations first: a line for the steps, points for evaluations."""
    known = [name for name, curve in curves.items() if not np.all(np.isnan(curve))]
    varying = [name for name in known if np.nanmin(curves[name]) != np.nanmax(curves[name])]
    subjects = dict.fromkeys(
        name.removeprefix(HELD_OUT) for name in sorted(varying, key=lambda name: not name.startswith(HELD_OUT))
    )
    charts = []
    for number, subject in enumerate(subjects):
        shown = subject.replace("_", " ")
        lines = []
        if subject in known:
            lines.append(Line(shown, subject, "blue", "number"))
        if HELD_OUT + subject in known:
            lines.append(Line(f"held-out {shown}", HELD_OUT + subject, "vermilion", "number", "points"))
        charts.append(Chart(f"figure-{number}", f"Line chart: {shown}.", tuple(lines), 170, False))
    return charts


def constant_figures(curves: Mapping[str, Curve]) -> list[tuple[str, float]]:
    """The figures that had one value in all steps, with that value."""
    varying = {line.column for chart in figure_charts(curves) for line in chart.lines}
    return [
        (name.replace("_", " "), float(np.nanmax(curve)))
        for name, curve in curves.items()
        if name not in varying and not np.all(np.isnan(curve))
    ]


_POINTS = 3000
"""Most points of all curves together: some hundreds of kilobytes, however long the run is."""
_ROWS = 10
_LEARNING_RATE = Line("learning rate", "learning_rate", "green", "number")
_GRADIENT_NORM = Line("gradient norm, before clipping", "gradient_norm", "purple", "number")
_RATE = Line("tokens per second", "tokens_per_second", "blue", "tokens/s")
_MFU = Line("MFU (right)", "mfu", "orange", "share", "dashed", right=True)
_MEMORY = Line("memory", "bytes", "vermilion", "bytes")


def curves_of(metrics: Sequence[StepMetrics]) -> dict[str, Curve]:
    """The figures of all logged steps by name, and the mean training loss of neighbouring steps; NaN where unknown."""
    names = ("loss", "validation_loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu", "bytes")
    curves = {name: np.array([getattr(logged, name) for logged in metrics], dtype=np.float64) for name in names}
    # Unknown values are 0 in the file.
    for name in ("mfu", "bytes"):
        curves[name][curves[name] == 0] = np.nan
    width = smoothing_width(len(metrics))
    if width > 1:
        curves["mean"] = smooth(curves["loss"], width)
    # A figure that is called as one of these is shown once.
    return {**figure_curves(metrics), **curves}


def run_charts(run: RunRecord, curves: dict[str, Curve]) -> Charts | None:
    """The charts of a run: losses, learning rate, gradient norm, throughput and memory; None before the first step.

    `curves` are those of `curves_of`.
    """
    if not run.metrics:
        return None
    table = Table(Positions(run), curves, _POINTS)
    losses = curves["loss"][~np.isnan(curves["loss"])]
    ends = f" from {losses[0]:.3g} to {losses[-1]:.3g}" if len(losses) else ""
    charts = [
        Chart("loss", f"Line chart: training and validation loss,{ends}.", _loss_lines(run), 320, False),
        Chart("learning-rate", "Line chart: learning rate.", (_LEARNING_RATE,), 150, True),
        Chart("gradient-norm", "Line chart: gradient norm before clipping.", (_GRADIENT_NORM,), 190, False),
        Chart("throughput", "Line chart: tokens per second, and MFU.", (_RATE, _MFU), 190, True),
        Chart("memory", "Line chart: memory of the process.", (_MEMORY,), 170, True),
        *figure_charts(figure_curves(run.metrics)),
    ]
    return charts_of(charts, [table], "tokens")


def figure_rows(metrics: Sequence[StepMetrics], curves: dict[str, Curve]) -> list[dict[str, str]]:
    """The figures of about ten steps, where possible of steps with a validation loss; a column without any figure is
    left out."""
    if not metrics:
        return []
    mean = curves.get("mean", curves["loss"])
    evaluated = [index for index, logged in enumerate(metrics) if logged.validation_loss is not None]
    candidates = evaluated if len(evaluated) > 1 else list(range(len(metrics)))
    places = np.unique(np.linspace(0, len(candidates) - 1, min(_ROWS, len(candidates))).round().astype(int))
    chosen = sorted({*(candidates[place] for place in places), len(metrics) - 1})
    rows = [_row(metrics[index], float(mean[index])) for index in chosen]
    absent = {name for name in rows[0] if all(row[name] == "–" for row in rows)}
    return [{name: cell for name, cell in row.items() if name not in absent} for row in rows]


def _row(logged: StepMetrics, loss: float) -> dict[str, str]:
    return {
        "step": f"{logged.step:,}",
        "tokens": format_figure(logged.tokens, "count"),
        "time": format_seconds(logged.seconds),
        "training loss": _figure(loss, "{:.4f}".format),
        "validation loss": _figure(logged.validation_loss, "{:.4f}".format),
        "learning rate": _figure(logged.learning_rate, format_three_digits),
        "gradient norm": _figure(logged.gradient_norm, format_three_digits),
        "tokens/s": _figure(logged.tokens_per_second, format_count),
        "MFU": _figure(logged.mfu or None, format_share),
        "memory": _figure(logged.bytes or None, format_bytes),
    }


def _figure(value: float | None, form) -> str:
    return "–" if value is None or not np.isfinite(value) else form(value)


def _loss_lines(run: RunRecord) -> tuple[Line, ...]:
    width, sample = smoothing_width(len(run.metrics)), sample_of(run)
    training = Line("training loss, nats per token", "loss", "blue", "loss", "faint" if width > 1 else "line")
    mean = Line(f"mean of {width} logged steps", "mean", "blue", "loss", "bold")
    # Only an evaluation of the whole held-out text shows its length.
    of_sample = f", of a sample of {'' if run.evaluation else 'up to '}{sample:,} tokens" if sample else ""
    validation = f"validation loss{of_sample}"
    return training, mean, Line(validation, "validation_loss", "vermilion", "loss", "points")
