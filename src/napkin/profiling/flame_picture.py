"""The seconds of a step as nested boxes, as SVG without scripts: phases, modules, the modules in them, operators."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from napkin.profiling.step_profile import StepProfile
from napkin.report.colours import COLOURS, shade
from napkin.units import format_seconds, format_share

WIDTH = 800
_ROW = 21
_NARROWEST = 0.6
"""Pixels: narrower boxes are left out, their room stays empty."""
_CHARACTER = 6.6
_OUTSIDE = "#c9c9c9"
_PHASES = ("forward", "recompute", "backward", "optimizer")


@dataclass
class Box:
    """A part of a step and the parts of it."""

    name: str
    seconds: float = 0.0
    outside: bool = False
    """Whether it is time in no operator."""
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
    told = f"{' · '.join(full)}: {format_seconds(box.seconds)}, {format_share(box.seconds / whole)}"
    yield (
        f'<g><title>{escape(_plain(told))}</title><rect class="box" x="{x:.2f}" y="{y}" width="{width:.2f}" '
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
    if part.name in _PHASES:
        return 0, _PHASES.index(part.name)
    return (1, int(part.name)) if part.name.isdecimal() and part.name.isascii() else (2, -part.seconds)


def _plain(text: str) -> str:
    """XML has no characters for controls."""
    return "".join(each if each.isprintable() else "�" for each in text[:300])
