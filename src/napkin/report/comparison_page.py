"""Runs compared on one self-contained page: a summary, a chart per axis, and the losses at equal points."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from napkin.accounting.quantity_row import Unit, format_figure
from napkin.errors import NapkinError
from napkin.files import atomic_write_text, refuse_unmarked
from napkin.report.charts import plain_axes, scale_losses
from napkin.report.comparison import AXES, Axis, ComparedRun, Loss
from napkin.report.curves import thin
from napkin.report.svg import COLOURS, draw_svg
from napkin.report.templates import render
from napkin.units import format_seconds, format_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHADES = ("blue", "vermilion", "green", "orange", "purple", "sky", "grey", "yellow")
MOST_RUNS = len(_SHADES)
GENERATOR = b'<meta name="generator" content="napkin runs">'
_WIDE, _NARROW = 760, 360
_UNITS: dict[Axis, Unit] = {
    "steps": "count",
    "tokens": "count",
    "flops": "FLOP",
    "seconds": "seconds",
    "dollars": "USD",
}
_LABELS = {"steps": "steps", "tokens": "tokens", "flops": "FLOPs", "seconds": "seconds", "dollars": "dollars"}


def write_comparison(
    path: Path, runs: Sequence[ComparedRun], *, loss: Loss, axis: Axis, points: Sequence[float]
) -> Path:
    """Write the page to `path`, replacing an earlier one, and return the path.

    Raises NapkinError for more runs than there are distinct colours, and where `path` is anything but such a page.
    """
    refuse_unmarked(path, GENERATOR, "a page that `napkin runs` wrote")
    if len(runs) > MOST_RUNS:
        raise NapkinError(f"a page shows at most {MOST_RUNS} runs, {len(runs)} are given: name fewer")
    known: list[Axis] = [each for each in AXES if any(len(run.curve(each, loss)[0]) for run in runs)]
    page = render(
        "comparison.html",
        colours=COLOURS,
        title=", ".join(run.summary.name for run in runs),
        loss=loss,
        warnings=[problem for run in runs for problem in run.problems],
        runs=[{"colour": shade, **cells} for shade, cells in zip(_SHADES, summary_rows(runs), strict=False)],
        charts=[
            {
                "label": _LABELS[each],
                "description": f"Line chart: {loss} losses over {_LABELS[each]}; the table below lists them.",
                "wide": Markup(comparison_chart(runs, each, loss, _WIDE)),
                "narrow": Markup(comparison_chart(runs, each, loss, _NARROW)),
            }
            for each in known
        ],
        axis=_LABELS[axis],
        rows=point_rows(runs, axis, points, loss),
    )
    atomic_write_text(path, page.replace("\0", "\N{REPLACEMENT CHARACTER}"), overwrite=True)
    return path


def comparison_chart(runs: Sequence[ComparedRun], axis: Axis, loss: Loss, width: int) -> str:
    """Draw each run's loss over an axis, in the colours of the page's legend."""
    import numpy as np

    curves = [run.curve(axis, loss) for run in runs]
    end = max((float(x[-1]) for x, _ in curves if len(x)), default=1.0) or 1.0
    unit, name = _unit_and_label(axis, end)

    def paint(figure: "Figure") -> None:
        axes = plain_axes(figure, left=38, right=14)
        axes.set_xlabel(name)
        axes.set_xlim(0, end / unit)
        for shade, (x, y) in zip(_SHADES, curves, strict=False):
            x, y = thin(x, y, width // 2)
            marker = "o" if loss == "validation" or len(y) == 1 else None
            axes.plot(x / unit, y, color=COLOURS[shade], linewidth=1.8, marker=marker, markersize=4)
        scale_losses(axes, np.concatenate([y for _, y in curves]))

    return draw_svg(f"loss-{axis}", width, 280, paint)


def summary_rows(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """The list of runs, one row each; a column without any figure is left out."""
    rows = [_summary_cells(run) for run in runs]
    absent = {name for name in (rows[0] if rows else ()) if name != "run" and all(row[name] == "–" for row in rows)}
    return [{name: cell for name, cell in row.items() if name not in absent} for row in rows]


def _summary_cells(run: ComparedRun) -> dict[str, Any]:
    """A run's row of the list, formatted."""
    found = run.summary
    return {
        "run": found.name,
        "state": found.state,
        "step": f"{found.step:,}" + (f" of {found.steps:,}" if found.steps and found.step < found.steps else ""),
        "tokens": format_figure(found.tokens, "count"),
        "loss": _loss(found.loss),
        "validation": _loss(found.validation_loss),
        "time": format_seconds(found.seconds),
        "MFU": "–" if found.mfu is None else format_share(found.mfu),
        "FLOPs": format_figure(found.flops, "FLOP"),
        "dollars": format_figure(found.dollars, "USD"),
    }


def point_rows(runs: Sequence[ComparedRun], axis: Axis, points: Sequence[float], loss: Loss) -> list[list[str]]:
    """The table at equal points: the position, and each run's loss there."""
    return [
        [format_figure(point, _UNITS[axis]), *(_loss(run.loss_at(axis, point, loss)) for run in runs)]
        for point in points
    ]


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _unit_and_label(axis: Axis, end: float) -> tuple[float, str]:
    """The unit of the axis, and its label."""
    if axis == "seconds":
        units = [(86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")]
        return next(((unit, name) for unit, name in units if end >= 2 * unit), (1.0, "seconds"))
    if axis == "dollars":
        return 1.0, "dollars"
    names = [(1e21, "10²¹"), (1e18, "10¹⁸"), (1e15, "10¹⁵"), (1e12, "10¹²"), (1e9, "billions"), (1e6, "millions")]
    names.append((1e3, "thousands"))
    label = _LABELS[axis]
    return next(((unit, f"{label}, in {name}") for unit, name in names if end >= unit), (1.0, label))
