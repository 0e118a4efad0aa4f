"""A picture of one step of a pipeline, as SVG without scripts: a row per rank, a box per action, idle time grey."""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from napkin.accounting.pipeline_schedules import Kind
from napkin.accounting.pipeline_simulation import PipelineTimeline, TimedAction
from napkin.errors import NapkinError
from napkin.report.xy_picture import COLOURS
from napkin.units import format_seconds, format_share

MOST_ROWS = 32
"""Ranks in a picture; of more, as many at equal distances are drawn, the first and the last among them."""

NARROWEST, WIDEST = 500, 2000
"""Pixels."""
SHORTEST, LONGEST = 1e-12, 1e12
"""Seconds of a step."""

_FILLS: dict[Kind, tuple[str, str]] = {
    "forward": (COLOURS["sky"], "forward"),
    "backward": (COLOURS["blue"], "backward"),
    "backward_input": (COLOURS["orange"], "backward, of the input"),
    "backward_weight": (COLOURS["green"], "backward, of weights"),
}
_IDLE = "#e4e4e4"
_LEFT, _RIGHT, _TOP, _ROW, _BOX = 64, 92, 70, 28, 22
_WIDTH_OF_A_DIGIT = 6.5
_BOX_FROM = 10.0
"""Width in pixels from which an action has its own labelled box; narrower ones are strokes of one path."""


def timeline_svg(timeline: PipelineTimeline, *, width: int = 1200, title: str | None = None) -> str:
    """Draw a simulated step.

    Boxes have the number of their micro-batch where there is room for it, and name themselves under the pointer; of
    several stages on a rank, later ones are paler. Actions that begin within the same pixel are drawn as one, in the
    colour of the one that takes longest, so the picture stays below 2 MB however many actions there are.

    `width` is in pixels; the title says schedule, ranks, micro-batches, seconds and idle time unless it is given.
    Raises NapkinError if the width is out of range, or the step takes no time, or more than any clock shows.
    """
    if not NARROWEST <= width <= WIDEST:
        raise NapkinError(f"a picture of {width} pixels is not possible: use a width of {NARROWEST} to {WIDEST}")
    if not SHORTEST <= timeline.seconds <= LONGEST:
        raise NapkinError(
            f"a step of {timeline.seconds:g} seconds has no picture: give seconds of stages that add up to "
            f"{SHORTEST:g} to {LONGEST:g}"
        )
    ranks = timeline.schedule.ranks
    drawn = min(ranks, MOST_ROWS)
    rows = [round(row * (ranks - 1) / max(1, drawn - 1)) for row in range(drawn)]
    scale = (width - _LEFT - _RIGHT) / timeline.seconds
    height = _TOP + _ROW * len(rows) + 56
    body = [*_header(timeline, title, rows), *_axis(timeline.seconds, scale, len(rows))]
    idle = timeline.idle_seconds
    for row, rank in enumerate(rows):
        body += _row(timeline, rank, _TOP + _ROW * row, scale, idle[rank])
    body += _legend(timeline, height - 14)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img">\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _header(timeline: PipelineTimeline, title: str | None, rows: Sequence[int]) -> Iterator[str]:
    schedule = timeline.schedule
    if title is None:
        stages = f" of {schedule.stages // schedule.ranks} stages" if schedule.stages > schedule.ranks else ""
        title = (
            f"{schedule.name}: {schedule.ranks} ranks{stages}, {schedule.micro_batches} micro-batches, "
            f"{format_seconds(timeline.seconds)} per step, "
            f"idle {format_share(_share(math.fsum(timeline.idle_seconds), timeline.seconds * schedule.ranks))}"
        )
    shown = _text(title)
    yield f"<title>{shown}</title>"
    yield f'<text x="{_LEFT}" y="22" font-size="15">{shown}</text>'
    if len(rows) < schedule.ranks:
        yield f'<text x="{_LEFT}" y="42" fill="#555555">{len(rows)} of {schedule.ranks} ranks are drawn</text>'


def _axis(seconds: float, scale: float, rows: int) -> Iterator[str]:
    bottom = _TOP + _ROW * rows
    for tick in ticks(seconds):
        x = _number(_LEFT + tick * scale)
        label = "0 s" if tick == 0 else format_seconds(tick)
        yield f'<path d="M{x} {_TOP - 6}V{bottom}" stroke="#bbbbbb"/>'
        yield f'<text x="{x}" y="{_TOP - 10}" text-anchor="middle" fill="#555555">{label}</text>'


def ticks(seconds: float) -> list[float]:
    """Round moments, at most eleven, from 0 to the end of a step.

    >>> ticks(0.95)
    [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    """
    power = 10.0 ** math.floor(math.log10(seconds / 10))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power * 10 >= seconds)
    return [round(index * step, 12 - math.floor(math.log10(step))) for index in range(math.floor(seconds / step) + 1)]


def _row(timeline: PipelineTimeline, rank: int, top: float, scale: float, idle: float) -> Iterator[str]:
    y = top + (_ROW - _BOX) / 2
    middle = top + _ROW / 2 + 4
    turns = {stage: turn for turn, stage in enumerate(timeline.schedule.stages_of(rank))}
    share = format_share(_share(idle, timeline.seconds))
    yield f'<text x="{_LEFT - 8}" y="{_number(middle)}" text-anchor="end">rank {rank}</text>'
    length = _number(timeline.seconds * scale)
    yield f'<rect class="row" x="{_LEFT}" y="{_number(y)}" width="{length}" height="{_BOX}" fill="{_IDLE}"/>'
    end = _number(_LEFT + timeline.seconds * scale + 8)
    yield f'<text x="{end}" y="{_number(middle)}" fill="#555555">{share} idle</text>'
    timed = timeline.ranks[rank]
    for each in timed:
        if (each.end - each.start) * scale >= _BOX_FROM:
            yield from _box(each, turns, y, scale)
    narrow = (each for each in timed if 0 < (each.end - each.start) * scale < _BOX_FROM)
    yield from _paths(narrow, turns, y, scale)


def _box(each: TimedAction, turns: dict[int, int], y: float, scale: float) -> Iterator[str]:
    action, start, end = each
    fill, name = _FILLS[action.kind]
    x, width = _LEFT + start * scale, (end - start) * scale
    turn = turns[action.stage]
    yield (
        f"<g><title>stage {action.stage}, {name}, micro-batch {action.micro_batch}: {format_seconds(start)} to "
        f'{format_seconds(end)}</title><rect class="{action.kind}" x="{_number(x)}" y="{_number(y)}" '
        f'width="{_number(width)}" height="{_BOX}" fill="{paler(fill, turn, len(turns))}" stroke="#ffffff" '
        'stroke-width="0.6"/>'
    )
    label = str(action.micro_batch)
    if width >= _WIDTH_OF_A_DIGIT * len(label) + 3:
        colour = "#ffffff" if action.kind == "backward" and turn == 0 else "#000000"
        yield (
            f'<text x="{_number(x + width / 2)}" y="{_number(y + _BOX / 2 + 4)}" text-anchor="middle" '
            f'font-size="11" fill="{colour}" pointer-events="none">{label}</text>'
        )
    yield "</g>"


def _paths(narrow: Iterable[TimedAction], turns: dict[int, int], y: float, scale: float) -> Iterator[str]:
    """The narrow actions of a row: one stroke for all that begin within a pixel of the first of them, those of a colour
    in one path."""
    groups: list[list[TimedAction]] = []
    for each in narrow:
        if not groups or (each.start - groups[-1][0].start) * scale >= 1:
            groups.append([])
        groups[-1].append(each)
    parts: dict[tuple[Kind, int], list[str]] = {}
    for group in groups:
        longest = max(group, key=lambda each: each.end - each.start).action
        x, wide = _number(_LEFT + group[0].start * scale), _number((group[-1].end - group[0].start) * scale)
        box = f"M{x} {_number(y)}h{wide}v{_BOX}h-{wide}z"
        parts.setdefault((longest.kind, turns[longest.stage]), []).append(box)
    for (kind, turn), boxes in parts.items():
        yield f'<path class="{kind}" fill="{paler(_FILLS[kind][0], turn, len(turns))}" d="{"".join(boxes)}"/>'


def _legend(timeline: PipelineTimeline, y: float) -> Iterator[str]:
    kinds = {each.action.kind for timed in timeline.ranks for each in timed}
    entries = [(fill, name) for kind, (fill, name) in _FILLS.items() if kind in kinds]
    entries.append((_IDLE, "idle"))
    x = float(_LEFT)
    for fill, name in entries:
        yield f'<rect class="legend" x="{_number(x)}" y="{_number(y - 10)}" width="12" height="12" fill="{fill}"/>'
        yield f'<text x="{_number(x + 17)}" y="{_number(y)}">{name}</text>'
        x += 17 + 6.4 * len(name) + 22
    if timeline.schedule.stages > timeline.schedule.ranks:
        yield f'<text x="{_number(x)}" y="{_number(y)}" fill="#555555">paler: a later stage of the rank</text>'


def paler(colour: str, turn: int, stages: int) -> str:
    """The colour of a rank's stage, mixed with white: none for its first stage, 65% for its last.

    >>> paler("#0072b2", 0, 2), paler("#0072b2", 1, 2)
    ('#0072b2', '#a6cee4')
    """
    white = 0.0 if stages < 2 else 0.65 * turn / (stages - 1)
    channels = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(channel + white * (255 - channel)):02x}" for channel in channels)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _number(value: float) -> str:
    """At most two digits after the point, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _text(title: str) -> str:
    """Escaped for XML, which has no characters for controls."""
    return escape("".join(each if each.isprintable() else "�" for each in title[:300]))
