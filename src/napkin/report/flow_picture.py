"""A picture of what flows through the stages of a pipeline, as SVG without scripts: a band that narrows, and beside it
what each stage took away."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from napkin.report.xy_picture import COLOURS
from napkin.units import format_count, format_share

_BAND_LEFT, _BAND_WIDTH, _LABELS_LEFT, _WIDTH = 200, 250, 530, 860
_ROW, _GAP, _TOP = 20, 34, 26
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
    parts: list[str] = [_band_label(_TOP, "entered", entered, entered, unit)]
    top, width = float(_TOP), _BAND_WIDTH * entered / whole
    for step in steps:
        reasons = _largest(step.taken)
        height = max(len(reasons), 1) * _ROW + _GAP
        below = _BAND_WIDTH * step.remained / whole
        parts.append(_narrowing(top, height, width, below))
        right = _BAND_LEFT + width
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


def _largest(taken: dict[str, float]) -> list[tuple[str, float]]:
    ordered = sorted(taken.items(), key=lambda each: (-each[1], each[0]))
    if len(ordered) <= _MOST_REASONS:
        return ordered
    rest = ordered[_MOST_REASONS - 1 :]
    return [*ordered[: _MOST_REASONS - 1], (f"{len(rest)} other rules", sum(amount for _, amount in rest))]


def _narrowing(top: float, height: float, width: float, below: float) -> str:
    bottom, middle = top + height, top + height / 2
    right, narrow = _BAND_LEFT + width, _BAND_LEFT + below
    curve = f"C {right:.1f} {middle:.1f} {narrow:.1f} {middle:.1f} {narrow:.1f} {bottom:.1f}"
    path = f"M {_BAND_LEFT} {top:.1f} H {right:.1f} {curve} H {_BAND_LEFT} Z"
    return f'<path d="{path}" fill="{COLOURS["blue"]}" fill-opacity="0.75"/>'


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
