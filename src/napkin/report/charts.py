"""The report's charts, each an <svg> element of a given width in pixels, without captions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from napkin.report.curves import Curve, smooth, thin
from napkin.report.svg import COLOURS, INK, PAPER, RULE, draw_svg
from napkin.runs.evaluation_file import Evaluation
from napkin.runs.metrics import StepMetrics
from napkin.units import format_three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHADES = {
    "parameters": "blue",
    "gradients": "orange",
    "optimizer state": "green",
    "weight copies": "sky",
    "activations": "vermilion",
    "inputs": "grey",
    "temporaries": "purple",
    "data": "orange",
    "forward": "sky",
    "backward": "blue",
    "recompute": "purple",
    "optimizer": "green",
    "metering": "yellow",
    "evaluation": "vermilion",
    "checkpoints": "purple",
    "other": "grey",
}


def shade(name: str) -> str:
    """The colour (one of svg.COLOURS) of a category of memory or of time; grey if it is unknown."""
    return _SHADES.get(name, "grey")


def smoothing_width(metrics: Sequence[StepMetrics]) -> int:
    """The number of logged steps that `loss_chart` averages its bold line over: 1/25 of the run, rounded to an odd
    number."""
    return len(metrics) // 25 // 2 * 2 + 1


def loss_chart(metrics: Sequence[StepMetrics], width: int) -> str:
    """Draw the training loss (thin), its average over neighbours (bold) and the validation losses over tokens.

    The loss axis is logarithmic if the losses span more than a factor of 3.
    """
    tokens, losses = _curve(metrics, "tokens"), _curve(metrics, "loss")
    validation = _curve(metrics, "validation_loss")
    smoothed = smooth(losses, smoothing_width(metrics))
    taken = ~np.isnan(validation)

    def paint(figure: "Figure") -> None:
        axes = plain_axes(figure, left=38, right=14)
        scale = _scale_tokens(axes, tokens)
        # More points than pixels add nothing.
        x, y = thin(tokens, losses, width)
        axes.plot(x / scale, y, color=COLOURS["blue"], linewidth=0.8, alpha=0.4, marker=_lone(y), markersize=4)
        x, y = thin(tokens, smoothed, width // 2)
        axes.plot(x / scale, y, color=COLOURS["blue"], linewidth=2)
        x, y = thin(tokens[taken], validation[taken], width // 6)
        axes.plot(x / scale, y, "o", color=COLOURS["vermilion"], mec=PAPER, mew=1, markersize=7, clip_on=False)
        scale_losses(axes, np.concatenate([losses, validation]))

    return draw_svg("loss", width, 320, paint)


def mfu_is_in_proportion(metrics: Sequence[StepMetrics]) -> bool:
    """Whether MFU is proportional to tokens per second within 1%, so that one line shows both."""
    mfu, rates = _curve(metrics, "mfu"), _curve(metrics, "tokens_per_second")
    known = (mfu > 0) & (rates > 0)
    ratios = mfu[known] / rates[known]
    return bool(len(ratios)) and float(ratios.max()) <= 1.01 * float(ratios.min())


def throughput_chart(metrics: Sequence[StepMetrics], width: int) -> str:
    """Draw tokens per second over tokens (left axis) and, if it is known, MFU (right axis)."""
    tokens, rates, mfu = (_curve(metrics, name) for name in ("tokens", "tokens_per_second", "mfu"))
    fastest, best = (float(np.max(np.nan_to_num(values), initial=0.0)) for values in (rates, mfu))

    def paint(figure: "Figure") -> None:
        axes = plain_axes(figure, left=46, right=46 if best else 14)
        scale = _scale_tokens(axes, tokens)
        axes.set_ylim(0, 1.15 * fastest or 1)
        axes.yaxis.set_major_locator(_few_ticks(4))
        unit, suffix = _unit(fastest)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value / unit:g}{suffix if value else ''}")
        lines = [(axes, rates, "blue")]
        if best:
            right = axes.twinx()
            right.set_ylim(0, 115 * best)
            right.yaxis.set_major_locator(_few_ticks(4))
            right.yaxis.set_major_formatter("{x:g}%")
            right.tick_params(length=0)
            right.spines[:].set_visible(False)
            if not mfu_is_in_proportion(metrics):
                lines.append((right, 100 * mfu, "orange"))
        for where, values, colour in lines:
            x, y = thin(tokens, values, width // 2)
            where.plot(x / scale, y, color=COLOURS[colour], linewidth=1.2, marker=_lone(y), markersize=4)

    return draw_svg("throughput", width, 190, paint)


def stacked_bar(name: str, parts: dict[str, float], width: int, *, limit: float | None = None) -> str:
    """Draw parts as one horizontal stacked bar in the colours of `shade`, without labels.

    With a `limit`, such as the free memory, the bar is drawn inside an outline of that size, unless it would be too
    small to see.
    """
    # A remainder such as "other" may be slightly negative.
    parts = {part: max(0.0, size) for part, size in parts.items()}
    total = sum(parts.values(), 0.0)
    shown = limit if limit and 0.2 * limit <= total else None
    full = max(total, shown or 0) or 1

    def paint(figure: "Figure") -> None:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.axis("off")
        # A margin of one pixel keeps the outline from being clipped.
        axes.set(xlim=(-full / width, full * (1 + 1 / width)), ylim=(0, 1))
        left = 0.0
        for part, size in parts.items():
            axes.barh(0.5, size, 0.86, left, color=COLOURS[shade(part)], edgecolor=PAPER, linewidth=1)
            left += size
        if shown:
            axes.barh(0.5, shown, 0.98, color="none", edgecolor=INK, linewidth=1.2)

    return draw_svg(name, width, 36, paint)


def bits_chart(evaluation: Evaluation, width: int) -> str:
    """Draw bits per byte of held-out text for the model, xz and gzip."""
    names = ["this model", "xz -9", "gzip -9"]
    bits = [evaluation.bits_per_byte, evaluation.xz_bits_per_byte, evaluation.gzip_bits_per_byte]

    def paint(figure: "Figure") -> None:
        left, right = 78 / width, 48 / width
        axes = figure.add_axes((left, 0, 1 - left - right, 1))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set_xticks([])
        axes.barh(names, bits, 0.62, color=[COLOURS["blue"], COLOURS["grey"], COLOURS["grey"]])
        axes.set(ylim=(2.5, -0.5), xlim=(0, max(bits) or 1))
        for row, value in enumerate(bits):
            weight = "bold" if row == 0 else "normal"
            axes.annotate(
                format_three_digits(value),
                (value, row),
                (6, 0),
                textcoords="offset points",
                va="center_baseline",
                weight=weight,
            )

    return draw_svg("bits", width, 110, paint)


def _curve(metrics: Sequence[StepMetrics], name: str) -> Curve:
    return np.array([getattr(logged, name) for logged in metrics], dtype=np.float64)


def plain_axes(figure: "Figure", *, left: int, right: int) -> "Axes":
    """The axes of every chart on a page, with margins in pixels."""
    # Fixed margins, because the page sets the text in another font than matplotlib's.
    width, height = figure.get_size_inches() * 72
    bottom, top = 44, 10
    axes = figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height))
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", which="both", length=0)
    return axes


def _scale_tokens(axes: "Axes", tokens: Curve) -> float:
    unit, _ = _unit(tokens[-1])
    names = {1e3: ", in thousands", 1e6: ", in millions", 1e9: ", in billions", 1e12: ", in trillions"}
    axes.set_xlabel(f"tokens{names.get(unit, '')}")
    axes.set_xlim(0, max(float(tokens[-1]), 1) / unit)
    axes.xaxis.set_major_locator(_few_ticks(6))
    axes.xaxis.set_major_formatter("{x:g}")
    return unit


def scale_losses(axes: "Axes", losses: Curve) -> None:
    """Scale the loss axis to the losses: logarithmic if they span more than a factor of 3."""
    from matplotlib.ticker import FixedLocator, NullLocator

    finite = losses[np.isfinite(losses)]
    if not len(finite):
        return
    low, high = float(finite.min()), float(finite.max())
    if low > 0 and high > 3 * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.06, high * 1.06)
        axes.yaxis.set_major_locator(FixedLocator(_logarithmic_ticks(low, high)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        margin = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)
        axes.yaxis.set_major_locator(_few_ticks(6))
    axes.yaxis.set_major_formatter("{x:g}")


def _logarithmic_ticks(low: float, high: float) -> list[float]:
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    for digits in [(1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 3), (1,)]:
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 8:
            break
    return ticks


def _few_ticks(number: int):
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(number, steps=[1, 2, 2.5, 5, 10])


def _unit(largest: float) -> tuple[float, str]:
    units = [(1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")]
    return next((unit for unit in units if largest >= unit[0]), (1.0, ""))


def _lone(y: Curve) -> str | None:
    # A curve of a single point would be invisible.
    return "o" if len(y) == 1 else None
