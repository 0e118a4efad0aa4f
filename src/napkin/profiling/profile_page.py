"""The page of a profile: one self-contained HTML file with its tables and pictures.

Pictures are SVG without scripts: the seconds of a step as nested boxes (phases, modules, the modules in them,
operators), operators under the roofs, and memory over the time of a step, beside what was planned.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np
from markupsafe import Markup

from napkin.accounting.ledger import Ledger, Moment, numbered_alike
from napkin.files import StrPath, atomic_write_text
from napkin.profiling.operator_calls import matched_rows
from napkin.profiling.profile_table import ALL, STEP, headings, statements, table_rows
from napkin.profiling.step_profile import By, Figures, StepProfile
from napkin.report.templates import WITHOUT_CHARTS, render
from napkin.report.xy_picture import COLOURS, Series, shade, xy_svg
from napkin.units import format_bytes, format_rate, format_seconds, format_share

WIDTH = 800
_ROW = 21
_NARROWEST = 0.6
"""Narrowest box in pixels; narrower ones are left out, and their space stays empty."""
_CHARACTER = 6.6
_OUTSIDE = "#c9c9c9"
_FLAME_PICTURE_PHASES = ("forward", "recompute", "backward", "optimizer")


@dataclass
class Box:
    """A part of a step and the parts of it."""

    name: str
    seconds: float = 0.0
    outside: bool = False
    """True for time in no operator."""
    parts: dict[str, "Box"] = field(default_factory=dict)

    def add(self, path: list[str], seconds: float, *, outside: bool = False) -> None:
        """Add seconds to this box and to those along a path of names in it."""
        self.seconds += seconds
        if path:
            first, *rest = path
            self.parts.setdefault(first, Box(first, outside=outside and not rest)).add(rest, seconds, outside=outside)


def flame_boxes(profile: StepProfile) -> Box:
    """The step by phase, module and operator; what is outside of operators beside them, where it came before them."""
    step = Box(profile.title)
    for row in profile.rows:
        if row.figures.seconds:
            # Modules and operators may have the same name.
            step.add([row.phase, *_modules(row.module), f"{row.operator}()"], row.figures.seconds)
    for row in profile.outside:
        step.add([row.phase or "other", *_modules(row.module), row.name], row.seconds, outside=True)
    return step


def flame_svg(profile: StepProfile) -> str:
    """Draw the boxes, the whole step on top; each has its path, seconds and share under the pointer."""
    step = flame_boxes(profile)
    height = _ROW * _depth(step) + 2
    body = _draw(step, 0.0, 0, WIDTH / step.seconds if step.seconds else 0.0, step.seconds, "grey", ())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img">\n'
        f"<title>Seconds of {escape(_plain(profile.title))} by phase, module and operator</title>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _modules(path: str) -> list[str]:
    return path.split(".") if path else []


def _depth(box: Box) -> int:
    return 1 + max(map(_depth, box.parts.values()), default=0)


def _draw(
    box: Box, x: float, level: int, scale: float, whole: float, colour: str, path: tuple[str, ...]
) -> Iterator[str]:
    width = box.seconds * scale
    if width < _NARROWEST:
        return
    if level == 1:
        colour = shade(box.name)
    fill = _OUTSIDE if box.outside else COLOURS[colour]
    opacity = 1.0 if box.outside else 0.75 if level < 2 or not box.parts else 0.45
    y = level * _ROW + 1
    full = (*path, box.name) if level else (box.name,)
    title = f"{' · '.join(full)}: {format_seconds(box.seconds)}, {format_share(box.seconds / whole)}"
    yield (
        f'<g><title>{escape(_plain(title))}</title><rect class="box" x="{x:.2f}" y="{y}" width="{width:.2f}" '
        f'height="{_ROW - 1}" fill="{fill}" fill-opacity="{opacity}" stroke="#ffffff" stroke-width="0.6"/>'
    )
    room = int((width - 6) / _CHARACTER)
    if room >= 2:
        name = _plain(box.name)
        label = name if len(name) <= room else name[: room - 1] + "…"
        yield f'<text x="{x + 3:.2f}" y="{y + 14}" fill="#000000" pointer-events="none">{escape(label)}</text>'
    yield "</g>"
    for part in sorted(box.parts.values(), key=_place):
        yield from _draw(part, x, level + 1, scale, whole, colour, full if level else ())
        x += part.seconds * scale


def _place(part: Box) -> tuple[int, float]:
    """Phases and numbered modules in their order, then other modules and operators, the longest first."""
    if part.name in _FLAME_PICTURE_PHASES:
        return 0, _FLAME_PICTURE_PHASES.index(part.name)
    return (1, int(part.name)) if part.name.isdecimal() and part.name.isascii() else (2, -part.seconds)


def _plain(text: str) -> str:
    """XML has no characters for controls."""
    return "".join(each if each.isprintable() else "�" for each in text[:300])


_MOST_MOMENTS = 1500
_ROOFS = ("vermilion", "orange", "purple")
_PROFILE_PICTURES_PHASES = {"forward": "sky", "backward": "blue", "optimizer": "green", "recompute": "purple"}
_BANDS = (("weights, state", "blue"), ("gradients", "orange"), ("weight copies", "sky"), ("activations", "vermilion"))


def roofline_svg(profile: StepProfile) -> str | None:
    """FLOP/s over FLOPs per byte, a point per operator, module and phase; None where nothing computes.

    Williams et al. 2009, "Roofline". Elementwise operators count one FLOP per element.
    """
    points = _points(profile)
    if not points or profile.roofs is None:
        return None
    lowest, highest = min(x for x, *_ in points) / 2, max(x for x, *_ in points) * 2
    series: list[Series] = []
    for colour, (name, peak) in zip(_ROOFS, profile.roofs.peaks.items(), strict=False):
        ridge = peak / profile.roofs.bandwidth
        x = np.array(sorted({lowest, ridge, max(highest, 2 * ridge)}))
        series.append(Series(f"roofs, {name}", x, np.minimum(peak, x * profile.roofs.bandwidth), colour, "line"))
    if not profile.roofs.peaks:
        x = np.array([lowest, highest])
        series.append(Series("main memory", x, x * profile.roofs.bandwidth, "vermilion", "line"))
    for phase, colour in _PROFILE_PICTURES_PHASES.items():
        of_phase = [(x, y, name) for x, y, name, each in points if each == phase]
        if of_phase:
            xs, ys, names = zip(*of_phase, strict=True)
            series.append(Series(phase, np.array(xs), np.array(ys), colour, "points", None, tuple(names)))
    return xy_svg(series, title="Operators under the roofs", x_label="FLOPs per byte", y_label="FLOP/s", width=WIDTH)


def _points(profile: StepProfile) -> list[tuple[float, float, str, str]]:
    """(FLOPs per byte, FLOP/s, description, phase)."""
    sums: dict[tuple[str, str, str], Figures] = {}
    for row in profile.rows:
        key = row.operator, numbered_alike(row.module), row.phase
        sums[key] = sums.get(key, Figures()) + row.figures
    points: list[tuple[float, float, str, str]] = []
    for (operator, module, phase), each in sums.items():
        flops = each.flops or each.elementwise_flops
        if flops and each.bytes_touched and each.seconds:
            rates = f"{format_rate(flops / each.seconds)}, {format_bytes(each.bytes_per_second)}/s"
            name = f"{operator}, {module or 'outside of modules'}, {phase}: {format_seconds(each.seconds)}, {rates}"
            points.append((flops / each.bytes_touched, flops / each.seconds, name, phase))
    return points


def memory_svg(profile: StepProfile) -> str | None:
    """Bytes in tensors over the milliseconds of a step, by category, and the planned sum; None where none is known."""
    moments = _in_time(profile.ledger.timeline, list(profile.row_moments))
    if len(moments) < 2:
        return None
    x = np.array([seconds * 1e3 for seconds, _ in moments])
    parts = np.array([_parts(moment) for _, moment in moments], dtype=np.float64) / 1e6
    edges = np.cumsum(np.concatenate([np.zeros((len(parts), 1)), parts], axis=1), axis=1)
    series = [
        Series(label, x, edges[:, index], colour, "band", edges[:, index + 1])
        for index, (label, colour) in enumerate((*_BANDS, ("other", "grey")))
    ]
    series.append(Series("measured", x, edges[:, -1], "grey", "line"))
    planned = _planned_moments(profile)
    if len(planned) > 1:
        xs = np.array([seconds * 1e3 for seconds, _ in planned])
        ys = np.array([moment.bytes_alive / 1e6 for _, moment in planned])
        series.append(Series("planned", xs, ys, "purple", "dashed"))
    return xy_svg(
        series,
        title="Bytes in tensors over a step",
        x_label="milliseconds from the step's begin",
        y_label="MB in tensors",
        log_x=False,
        log_y=False,
        width=WIDTH,
        height=360,
    )


def _parts(moment: Moment) -> tuple[int, ...]:
    named = (
        moment.state_bytes - moment.gradient_bytes,
        moment.gradient_bytes,
        moment.weight_copy_bytes,
        moment.activation_bytes,
    )
    return (*named, moment.bytes_alive - sum(named))


def _planned_moments(profile: StepProfile) -> list[tuple[float, Moment]]:
    """The plan's moments, at the time of the same operators in the step that ran."""
    if profile.planned_ledger is None:
        return []
    places = matched_rows(_operators(profile.planned_ledger), _operators(profile.ledger))
    ends = [None if place is None else profile.row_moments[place] for place in places]
    return _in_time(profile.planned_ledger.timeline, ends)


def _operators(ledger: Ledger) -> list[str]:
    return [row.operator for row in ledger.rows]


def _in_time(timeline: Sequence[Moment], ends: Sequence[float | None]) -> list[tuple[float, Moment]]:
    """Moments with the seconds at which they were, at most a picture's worth: of several, the one with most bytes."""
    placed = [(end, moment) for moment in sorted(timeline) if (end := ends[moment.row]) is not None]
    size = -(-len(placed) // _MOST_MOMENTS) or 1
    groups = [placed[first : first + size] for first in range(0, len(placed), size)]
    return [max(group, key=lambda one: one[1].bytes_alive) for group in groups]


_MOST_ROWS: dict[By, int] = {"phase": 10, "module": 30, "operator": 30}


def write_profile_page(profile: StepProfile, path: StrPath) -> Path:
    """Write the page. Raises NapkinError where the file exists."""
    path = Path(path)
    atomic_write_text(path, render_profile_page(profile))
    return path


def render_profile_page(profile: StepProfile) -> str:
    """The page as text; names of modules, operators and files are escaped."""
    drawn = {
        "flame": ("Phases, modules, operators", flame_svg(profile)),
        "roofline": ("Under the roofs", roofline_svg(profile)),
        "memory": ("Memory over the step", memory_svg(profile)),
    }
    pictures = {key: (title, Markup(picture)) for key, (title, picture) in drawn.items() if picture is not None}
    tables = {
        f"by-{by}": (f"By {by}", headings(by), table_rows(profile, by, most=most)) for by, most in _MOST_ROWS.items()
    }
    sections = {key: title for key, (title, *_) in {**pictures, **tables}.items()}
    outside = _outside(profile)
    if outside:
        sections["outside"] = "In no operator"
    if profile.ranks:
        sections["ranks"] = "Rank by rank"
    return render(
        "profile.html",
        colours=COLOURS,
        title=profile.title,
        device=profile.device_name,
        sections=sections,
        keys=_keys(profile),
        statements=statements(profile),
        pictures=pictures,
        notes=_NOTES,
        tables=tables,
        sums={ALL, STEP},
        outside=outside,
        ranks=_ranks(profile),
        **WITHOUT_CHARTS,
    )


_NOTES = {
    "flame": "Widths are seconds. Grey is time in no operator, in the module that computes next.",
    "roofline": "A point per operator, module and phase; the pointer names it. Elementwise operators count one FLOP "
    "per element. Points above the slope read their operands from a cache.",
    "memory": "Bytes in tensors by the recorded step, at the time of the same calls in a profiled one.",
}


def _keys(profile: StepProfile) -> list[tuple[str, str, str]]:
    """The figures at the head of the page, as (name, figure, note)."""
    keys = [("per step", format_seconds(profile.seconds), "")]
    if profile.price is not None:
        ratio = profile.seconds / profile.price.seconds if profile.price.seconds else 0.0
        keys.append(("planned", format_seconds(profile.price.seconds), f"measured is {ratio:.2f} ×"))
    keys.append(("in operators", format_share(profile.explained), ""))
    rate = profile.total.flops / profile.seconds
    best = max(profile.roofs.peaks.values(), default=0.0) if profile.roofs else 0.0
    keys.append(("FLOP/s", format_rate(rate), f"{format_share(rate / best)} of the peak" if best else ""))
    keys.append(("peak bytes", format_bytes(profile.ledger.peak_bytes), ""))
    keys.append(("overhead of profiling", format_share(profile.overhead), ""))
    return keys


def _outside(profile: StepProfile) -> list[tuple[str, ...]]:
    outside = profile.outside_by(lambda row: f"{row.name}, {row.phase}" if row.phase else row.name)
    return [
        (name, format_seconds(seconds), format_share(seconds / profile.seconds)) for name, seconds in outside.items()
    ]


def _ranks(profile: StepProfile) -> list[tuple[str, ...]]:
    names = ("seconds", "operators", "collectives", "outside")
    return [
        (str(number), *(format_seconds(each[name]) for name in names), format_share(each["overhead"]))
        for number, each in enumerate(profile.ranks)
    ]
