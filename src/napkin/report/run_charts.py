"""The charts of the page of one run, and the figures that they show as a table."""

from collections.abc import Sequence

import numpy as np

from napkin.accounting.quantities import format_figure
from napkin.report.charts import Chart, Charts, Line, Table, charts_of, figure_charts, figure_curves
from napkin.report.headline import sample_of
from napkin.report.overfitting import Curve, smooth, smoothing_width
from napkin.report.xy_picture import Positions
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_record import RunRecord
from napkin.units import format_bytes, format_count, format_seconds, format_share, format_three_digits

_POINTS = 3000
"""Most points of all curves together: some hundreds of kilobytes, however long the run is."""
_ROWS = 10
_LEARNING_RATE = Line("learning rate", "learning_rate", "green", "number")
_GRADIENT_NORM = Line("gradient norm, before clipping", "gradient_norm", "purple", "number")
_RATE = Line("tokens per second", "tokens_per_second", "blue", "tokens/s")
_MFU = Line("MFU (right)", "mfu", "orange", "share", "dashed", right=True)
_MEMORY = Line("memory", "bytes", "vermilion", "bytes")


def curves_of(metrics: Sequence[StepMetrics]) -> dict[str, Curve]:
    """The figures of all logged steps by name, and the mean training loss of neighbouring steps; NaN is not known."""
    names = ("loss", "validation_loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu", "bytes")
    curves = {name: np.array([getattr(logged, name) for logged in metrics], dtype=np.float64) for name in names}
    # Where they are not known they are 0.
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
    # How long the held-out text is, only an evaluation of all of it tells.
    of_sample = f", of a sample of {'' if run.evaluation else 'up to '}{sample:,} tokens" if sample else ""
    validation = f"validation loss{of_sample}"
    return training, mean, Line(validation, "validation_loss", "vermilion", "loss", "points")
