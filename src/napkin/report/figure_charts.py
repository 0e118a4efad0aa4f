"""Charts of a tuned run's further figures: reward, length, entropy and what else its steps tell, one chart each."""

from collections.abc import Mapping, Sequence

import numpy as np

from napkin.report.charts import Chart, Line
from napkin.report.curves import Curve
from napkin.runs.metrics import StepMetrics

HELD_OUT = "held-out "
"""Begins the names of an evaluation's figures, which are points in the chart of the same figure."""


def figure_curves(metrics: Sequence[StepMetrics]) -> dict[str, Curve]:
    """The further figures of all logged steps by name; NaN where a step has none."""
    names = dict.fromkeys(name for logged in metrics for name in logged.figures or {})
    return {name: np.array([_value(logged.figures, name) for logged in metrics], dtype=np.float64) for name in names}


def figure_charts(curves: Mapping[str, Curve]) -> list[Chart]:
    """A chart for each figure that varies, those of evaluations first: a line for the steps, points for evaluations."""
    known = [name for name, curve in curves.items() if not np.all(np.isnan(curve))]
    varying = [name for name in known if not _is_constant(curves[name])]
    subjects = dict.fromkeys(name.removeprefix(HELD_OUT) for name in sorted(varying, key=_is_of_steps))
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


def _is_constant(curve: Curve) -> bool:
    return bool(np.nanmin(curve) == np.nanmax(curve))


def _is_of_steps(name: str) -> bool:
    return not name.startswith(HELD_OUT)


def _value(figures: Mapping[str, float | None] | None, name: str) -> float:
    found = (figures or {}).get(name)
    return np.nan if found is None else found
