"""Bars of the page of a run, as lengths in percent; the template makes them of HTML, so that they need no script."""

from collections.abc import Mapping
from typing import NamedTuple

from napkin.report.colours import shade
from napkin.runs.evaluation_file import Evaluation
from napkin.units import format_three_digits


class Segment(NamedTuple):
    """A part of a stacked bar."""

    colour: str
    percent: float


class StackedBar(NamedTuple):
    """Parts of a whole, side by side."""

    segments: list[Segment]
    outlined: bool
    """Whether the whole bar is a limit that the parts are compared with, and is outlined."""
    description: str


class Bar(NamedTuple):
    """A bar with its name and figure."""

    name: str
    figure: str
    colour: str
    percent: float


def stacked_bar(parts: Mapping[str, float], description: str, *, limit: float | None = None) -> StackedBar:
    """Parts as one stacked bar in the colours of `shade`.

    With a `limit`, such as the free memory, 100% is the limit, unless the parts would be too small to see.
    """
    # A remainder such as "other" may be slightly negative.
    sizes = {part: max(0.0, size) for part, size in parts.items()}
    total = sum(sizes.values(), 0.0)
    outlined = bool(limit and 0.2 * limit <= total)
    full = max(total, limit or 0.0) if outlined else total
    segments = [Segment(shade(part), round(100 * size / (full or 1.0), 3)) for part, size in sizes.items()]
    return StackedBar(segments, outlined, description)


def bits_bars(evaluation: Evaluation) -> list[Bar]:
    """Bits per byte of held-out text for the model, xz and gzip; the longest bar has 100%."""
    bits = {
        "this model": evaluation.bits_per_byte,
        "xz -9": evaluation.xz_bits_per_byte,
        "gzip -9": evaluation.gzip_bits_per_byte,
    }
    longest = max(bits.values()) or 1.0
    return [
        Bar(name, format_three_digits(value), "grey" if index else "blue", round(100 * value / longest, 3))
        for index, (name, value) in enumerate(bits.items())
    ]
