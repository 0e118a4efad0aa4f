"""The data of a page's charts, which charts.js draws with uPlot: thinned curves, lines and axes, as one JSON object.

Charts of a tuned run's further figures: reward, length, entropy and what else its steps tell, one chart each.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from markupsafe import Markup

from napkin.report.overfitting import Curve, thin
from napkin.report.xy_picture import AXES, LABELS, UNITS, Axis, Positions, unit_and_label
from napkin.runs.metrics import StepMetrics

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
    content = {
        "axis": axis,
        "axes": {each: _axis(each, ends[each]) for each in axes},
        "tables": [{"positions": table.positions, "curves": table.curves} for table in tables],
        "charts": {chart.name: asdict(chart) for chart in shown},
    }
    names: list[tuple[Axis, str]] = [(each, LABELS[each]) for each in axes]
    return Charts({chart.name: chart for chart in shown}, names, axis, as_data(content))


def as_data(content: Any) -> Markup:
    """Content as JSON for the inside of a <script> element, which no string in it can end."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _axis(axis: Axis, end: float) -> dict[str, Any]:
    scale, label = unit_and_label(axis, end)
    return {"name": LABELS[axis], "label": label, "scale": scale, "unit": UNITS[axis]}


def _rounded(values: Curve) -> list[float | int | None]:
    # Six digits are more than a chart can show, and their text is short.
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.6g}")


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
    return {name: np.array([_value(logged.figures, name) for logged in metrics], dtype=np.float64) for name in names}


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
    """The figures that had one value in all steps, with it."""
    varying = {line.column for chart in figure_charts(curves) for line in chart.lines}
    return [
        (name.replace("_", " "), float(np.nanmax(curve)))
        for name, curve in curves.items()
        if name not in varying and not np.all(np.isnan(curve))
    ]


def _value(figures: Mapping[str, float | None] | None, name: str) -> float:
    found = (figures or {}).get(name)
    return np.nan if found is None else found
