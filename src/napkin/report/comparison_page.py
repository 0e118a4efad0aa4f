"""Runs compared on one self-contained page: a ranking by validation loss, charts, what differs between the recipes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from napkin.accounting.quantities import format_figure
from napkin.errors import NapkinError
from napkin.files import atomic_write_text, refuse_unmarked
from napkin.report.charts import Chart, Charts, Line, Table, charts_of
from napkin.report.comparison import ComparedRun, Loss, Ranking, differences, rank
from napkin.report.templates import UPLOT, UPLOT_STYLE, read_asset, render, scripts
from napkin.report.xy_picture import COLOURS, LABELS, UNITS, Axis
from napkin.units import format_seconds, format_share, format_three_digits

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
    differing = differences(ordered)
    page = render(
        "comparison.html",
        colours=COLOURS,
        title=", ".join(run.summary.name for run in ordered),
        sections=_sections(ranking, charts, loss, axis),
        statements=ranking.statements,
        warnings=[problem for run in ordered for problem in run.problems],
        runs=rows,
        tables=[part for part in (rows[: len(ranking.ranked)], rows[len(ranking.ranked) :]) if part],
        charts=charts,
        chart_style=read_asset(UPLOT_STYLE),
        differences=differing,
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
    found, best_step = run.summary, run.summary.best_validation_step
    return {
        "run": found.name,
        "state": found.state,
        "step": f"{found.step:,}" + (f" of {found.steps:,}" if found.steps and found.step < found.steps else ""),
        "tokens": format_figure(found.tokens, "count"),
        "lowest": _loss(found.best_validation_loss),
        "at step": "–" if best_step is None else f"{best_step:,}",
        "validation": _loss(found.validation_loss),
        "loss": _loss(found.loss),
        "bits per byte": "–" if run.evaluation is None else format_three_digits(run.evaluation.bits_per_byte),
        "time": format_seconds(found.seconds),
        "MFU": "–" if found.mfu is None else format_share(found.mfu),
        "FLOPs": format_figure(found.flops, "FLOP"),
        "dollars": format_figure(found.dollars, "USD"),
    }


def _sections(ranking: Ranking, charts: Charts, loss: Loss, axis: Axis) -> dict[str, str]:
    """The headings of the page by their anchors, in order."""
    over = {name: f"{name.capitalize()} loss" for name in charts.by_name}
    summary = f"Runs by {ranking.by}" if ranking.by else "Runs"
    recipes = {"differences": "What differs between the recipes"}
    return {"summary": summary, **over, **recipes, "points": f"{loss.capitalize()} loss at equal {LABELS[axis]}"}


def _note(run: ComparedRun) -> str:
    if run.overfitting is None:
        return ""
    return f"overfitted after step {run.overfitting.best.step:,}"


def _ranked_rows(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """The list of runs for the page: losses first, and states only if a run is not finished."""
    first = ("run", "lowest", "at step", "validation", "loss", "bits per byte")
    left_out = {"state"} if all(run.summary.state == "finished" for run in runs) else set()
    rows = []
    for shade, run, cells in zip(_SHADES, runs, summary_rows(runs), strict=False):
        names = [*(name for name in first if name in cells), *(name for name in cells if name not in first)]
        shown = {name: cells[name] for name in names if name not in left_out}
        rows.append({"colour": shade, "note": _note(run), **shown})
    return rows


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
