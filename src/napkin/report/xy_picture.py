"""Pictures as SVG without scripts: points, lines and bands over logarithmic or linear axes; and what flows through the
stages of a pipeline.

The colours of the pages are here, and the axes of a loss: steps, tokens, FLOPs, seconds or dollars.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from napkin.accounting.quantities import Unit
from napkin.errors import NapkinError
from napkin.report.overfitting import Curve
from napkin.runs.run_record import RunRecord
from napkin.units import format_count, format_share

# Okabe & Ito's palette, safe for colour-blind readers; style.html has brighter ones for a dark background.
COLOURS = {
    "blue": "#0072b2",
    "orange": "#e69f00",
    "green": "#009e73",
    "vermilion": "#d55e00",
    "sky": "#56b4e9",
    "purple": "#cc79a7",
    "yellow": "#f0e442",
    "grey": "#8c8c8c",
}

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
    """The colour (one of `COLOURS`) of a category of memory or of time; grey if it is unknown."""
    return _SHADES.get(name, "grey")


Values = NDArray[np.float64]

MOST_POINTS = 20_000
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 16, 34, 52
_TICKS = 6


@dataclass(frozen=True)
class Series:
    """The points, or the line, that are drawn in one colour."""

    label: str
    x: Values
    """[points]"""
    y: Values
    """[points]; of a band the lower edge."""
    colour: str = "blue"
    style: Literal["points", "line", "dashed", "band"] = "points"
    upper: Values | None = None
    """[points]: the upper edge of a band."""
    names: tuple[str, ...] = ()
    """The name of each point, shown under the pointer."""


@dataclass(frozen=True)
class Scale:
    """An axis: from the lowest to the highest value, in pixels."""

    low: float
    high: float
    start: float
    stop: float
    logarithmic: bool

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high, at = (math.log10(each) if self.logarithmic else each for each in (self.low, self.high, value))
        return self.start + (self.stop - self.start) * (at - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round values within, two or more."""
        if not self.logarithmic:
            return _round_steps(self.low, self.high)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        if last - first <= 2:
            return _round_steps(self.low, self.high)
        decades = (10.0**power for power in range(first, last + 1, math.ceil((last - first) / 10)))
        return [each for each in decades if self.low <= each <= self.high]


def xy_svg(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = True,
    log_y: bool = True,
    width: int = 760,
    height: int = 420,
) -> str:
    """Draw series over common axes; points that are not finite, or not above 0 on a logarithmic axis, are left out.

    Raises:
        NapkinError: where no point is left, or there are more than `MOST_POINTS`.
    """
    cleaned = [_clean(each, log_x, log_y) for each in series]
    cleaned = [each for each in cleaned if len(each.x)]
    if not cleaned:
        raise NapkinError("there is nothing to draw: give points with finite coordinates")
    if sum(len(each.x) for each in cleaned) > MOST_POINTS:
        raise NapkinError(f"a picture has at most {MOST_POINTS:,} points: give fewer")
    xs = np.concatenate([each.x for each in cleaned])
    ys = np.concatenate([part for each in cleaned for part in (each.y, each.upper) if part is not None])
    across = _scale(xs, _LEFT, width - _RIGHT, log_x)
    up = _scale(ys, height - _BOTTOM, _TOP, log_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_axes(across, up, x_label, y_label, width, height),
    ]
    order = {"band": 0, "line": 1, "dashed": 1, "points": 2}
    for each in sorted(cleaned, key=lambda one: order[one.style]):
        parts += _draw(each, across, up)
    parts += _legend(cleaned)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _clean(series: Series, log_x: bool, log_y: bool) -> Series:
    x, y = np.asarray(series.x, dtype=np.float64), np.asarray(series.y, dtype=np.float64)
    upper = y if series.upper is None else np.asarray(series.upper, dtype=np.float64)
    kept = np.isfinite(x) & np.isfinite(y) & np.isfinite(upper)
    kept &= (x > 0) | (not log_x)
    kept &= ((y > 0) & (upper > 0)) | (not log_y)
    names = tuple(name for name, keep in zip(series.names, kept, strict=False) if keep)
    edge = None if series.upper is None else upper[kept]
    return Series(series.label, x[kept], y[kept], series.colour, series.style, edge, names)


def _scale(values: Values, start: float, stop: float, logarithmic: bool) -> Scale:
    low, high = float(values.min()), float(values.max())
    if logarithmic:
        margin = max((math.log10(high) - math.log10(low)) * 0.04, 0.01)
        return Scale(low / 10**margin, high * 10**margin, start, stop, True)
    margin = max((high - low) * 0.05, 1e-9 * max(abs(high), 1e-300), 1e-300)
    return Scale(low - margin, high + margin, start, stop, False)


def _round_steps(low: float, high: float) -> list[float]:
    raw = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step)
    return [
        round(number * step, 12 - math.floor(math.log10(step))) for number in range(first, math.floor(high / step) + 1)
    ]


def _axes(across: Scale, up: Scale, x_label: str, y_label: str, width: int, height: int) -> Iterator[str]:
    bottom = height - _BOTTOM
    for tick in across.ticks():
        x = f"{across(tick):.1f}"
        yield f'<path d="M{x} {_TOP}V{bottom}" stroke="#e4e4e4"/>'
        yield f'<text x="{x}" y="{bottom + 18}" text-anchor="middle" fill="#555555">{_label(tick)}</text>'
    for tick in up.ticks():
        y = up(tick)
        yield f'<path d="M{_LEFT} {y:.1f}H{width - _RIGHT}" stroke="#e4e4e4"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555555">{_label(tick)}</text>'
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{width - _RIGHT}" fill="none" stroke="#888888"/>'
    yield f'<text x="{(width + _LEFT) / 2:.0f}" y="{height - 12}" text-anchor="middle">{escape(x_label)}</text>'
    middle = (_TOP + bottom) / 2
    yield (
        f'<text x="16" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 16 {middle:.0f})">'
        f"{escape(y_label)}</text>"
    )


def _label(value: float) -> str:
    power = math.log10(value) if value > 0 else 0.5
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        if abs(power - round(power)) < 1e-9:
            return f"10{str(round(power)).translate(_SUPERSCRIPTS)}"
        return f"{value:.3g}"
    return f"{value:.6g}"


_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def _draw(series: Series, across: Scale, up: Scale) -> Iterator[str]:
    colour = COLOURS[series.colour]
    places = [(across(x), up(y)) for x, y in zip(series.x.tolist(), series.y.tolist(), strict=True)]
    if series.style == "points":
        for index, (x, y) in enumerate(places):
            name = f"<title>{escape(series.names[index])}</title>" if index < len(series.names) else ""
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.75">{name}</circle>'
        return
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    if series.style == "band" and series.upper is not None:
        back = [(across(x), up(y)) for x, y in zip(series.x.tolist(), series.upper.tolist(), strict=True)]
        path += "L" + "L".join(f"{x:.1f} {y:.1f}" for x, y in reversed(back)) + "Z"
        yield f'<path class="band" d="M{path}" fill="{colour}" fill-opacity="0.22"/>'
        return
    dashes = ' stroke-dasharray="6 4"' if series.style == "dashed" else ""
    yield f'<path class="line" d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>'


def _legend(series: Sequence[Series]) -> Iterator[str]:
    x = float(_LEFT)
    for each in series:
        if each.label:
            yield f'<rect x="{x:.0f}" y="12" width="12" height="12" fill="{COLOURS[each.colour]}" fill-opacity="0.75"/>'
            yield f'<text x="{x + 17:.0f}" y="22">{escape(each.label)}</text>'
            x += 17 + 6.6 * len(each.label) + 20


Axis = Literal["steps", "tokens", "flops", "seconds", "dollars"]
AXES: tuple[Axis, ...] = ("steps", "tokens", "flops", "seconds", "dollars")
LABELS: dict[Axis, str] = {axis: "FLOPs" if axis == "flops" else axis for axis in AXES}
UNITS: dict[Axis, Unit] = {"steps": "count", "tokens": "count", "flops": "FLOP", "seconds": "seconds", "dollars": "USD"}
_POWERS = {1e21: "10²¹", 1e18: "10¹⁸", 1e15: "10¹⁵", 1e12: "10¹²", 1e9: "billions", 1e6: "millions", 1e3: "thousands"}


class Positions:
    """The position of each logged step of a run on each axis."""

    def __init__(self, record: RunRecord, *, usd_per_hour: float | None = None) -> None:
        plan = record.plan
        self._flops_per_step = sum(plan.flops_by_phase.values()) if plan else None
        self._usd_per_second = None if usd_per_hour is None else usd_per_hour / 3600
        if usd_per_hour is None and plan is not None and plan.dollars is not None and plan.seconds:
            self._usd_per_second = plan.dollars / plan.seconds
        self._steps, self._tokens, self._seconds = (
            np.array([getattr(logged, name) for logged in record.metrics], dtype=np.float64)
            for name in ("step", "tokens", "seconds")
        )

    def along(self, axis: Axis) -> Curve:
        """The positions on an axis; empty if they are not known."""
        known = {"steps": self._steps, "tokens": self._tokens, "seconds": self._seconds}
        if self._flops_per_step is not None:
            known["flops"] = self._steps * self._flops_per_step
        if self._usd_per_second is not None:
            known["dollars"] = self._seconds * self._usd_per_second
        return known.get(axis, np.empty(0))


def unit_and_label(axis: Axis, end: float) -> tuple[float, str]:
    """The unit in which an axis up to `end` is labelled, and its label.

    >>> unit_and_label("tokens", 2.5e6), unit_and_label("seconds", 7200.0)
    ((1000000.0, 'tokens, in millions'), (3600.0, 'hours'))
    """
    if axis == "seconds":
        units = [(86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")]
        return next(((unit, name) for unit, name in units if end >= 2 * unit), (1.0, "seconds"))
    if axis == "dollars":
        return 1.0, "dollars"
    label = LABELS[axis]
    return next(((unit, f"{label}, in {name}") for unit, name in _POWERS.items() if end >= unit), (1.0, label))


_BAND_LEFT, _BAND_WIDTH, _LABELS_LEFT, _WIDTH = 200, 250, 530, 860
_ROW, _GAP, _BAND_TOP = 20, 34, 26
_MOST_REASONS = 6


@dataclass(frozen=True)
class FlowStep:
    """A stage: what remained after it, and what it took away by reason, in one unit."""

    name: str
    remained: float
    taken: dict[str, float]


def flow_svg(title: str, entered: float, steps: Sequence[FlowStep], unit: str) -> str:
    """Draw what entered, what each step took away and what remained, as widths in proportion.

    The largest reasons of a step have a line each, the others one together.
    """
    whole = max([entered, *(step.remained for step in steps)]) or 1.0
    parts: list[str] = [_band_label(_BAND_TOP, "entered", entered, entered, unit)]
    top, width = float(_BAND_TOP), _BAND_WIDTH * entered / whole
    for step in steps:
        reasons = sorted(step.taken.items(), key=lambda each: (-each[1], each[0]))
        if len(reasons) > _MOST_REASONS:
            rest = reasons[_MOST_REASONS - 1 :]
            reasons[_MOST_REASONS - 1 :] = [(f"{len(rest)} other rules", sum(amount for _, amount in rest))]
        height = max(len(reasons), 1) * _ROW + _GAP
        below = _BAND_WIDTH * step.remained / whole
        right, narrow, middle, bottom = _BAND_LEFT + width, _BAND_LEFT + below, top + height / 2, top + height
        curve = f"C {right:.1f} {middle:.1f} {narrow:.1f} {middle:.1f} {narrow:.1f} {bottom:.1f}"
        band = f"M {_BAND_LEFT} {top:.1f} H {right:.1f} {curve} H {_BAND_LEFT} Z"
        parts.append(f'<path d="{band}" fill="{COLOURS["blue"]}" fill-opacity="0.75"/>')
        for number, (reason, amount) in enumerate(reasons):
            taken = _BAND_WIDTH * amount / whole
            y = top + _GAP / 2 + number * _ROW
            parts.append(_ribbon(right - taken, top, taken, y))
            label = f"{reason}: {format_count(round(amount))} ({format_share(amount / whole)})"
            parts.append(_text(_LABELS_LEFT + 8, y + 4, label, "start"))
            right -= taken
        top += height
        width = below
        parts.append(_band_label(top, step.name, step.remained, entered, unit))
    total = round(top + 24)
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {total}" width="{_WIDTH}" height="{total}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img">'
    )
    return "\n".join([opening, f"<title>{escape(title)}</title>", *parts, "</svg>"]) + "\n"


def _ribbon(left: float, top: float, width: float, y: float) -> str:
    """The path from a part of the band's upper edge to its label; its end is as thick as a line of text at most."""
    thickness = max(0.7, min(width, _ROW - 6)) / 2
    end = _LABELS_LEFT
    path = (
        f"M {left:.1f} {top:.1f} H {left + width:.1f} "
        f"C {left + width:.1f} {y - thickness:.1f} {left + width:.1f} {y - thickness:.1f} {end} {y - thickness:.1f} "
        f"V {y + thickness:.1f} C {left:.1f} {y + thickness:.1f} {left:.1f} {y + thickness:.1f} {left:.1f} {top:.1f} Z"
    )
    return f'<path d="{path}" fill="{COLOURS["orange"]}" fill-opacity="0.6"/>'


def _band_label(y: float, name: str, amount: float, of: float, unit: str) -> str:
    share = format_share(amount / of) if of else "–"
    figure = f"{format_count(round(amount))} {unit}, {share}"
    line = f'<line x1="{_BAND_LEFT - 6}" x2="{_BAND_LEFT + _BAND_WIDTH + 6}" y1="{y:.1f}" y2="{y:.1f}" stroke="#666"/>'
    name_text = _text(_BAND_LEFT - 10, y - 2, name, "end", weight="600")
    return "\n".join([line, name_text, _text(_BAND_LEFT - 10, y + 12, figure, "end")])


def _text(x: float, y: float, text: str, anchor: str, weight: str = "400") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="currentColor">'
        f"{escape(text)}</text>"
    )
