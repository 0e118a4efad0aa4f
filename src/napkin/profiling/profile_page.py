"""The page of a profile: one self-contained HTML file with its tables and pictures."""

from pathlib import Path

from markupsafe import Markup

from napkin.files import StrPath, atomic_write_text
from napkin.profiling.flame_picture import flame_svg
from napkin.profiling.profile_pictures import memory_svg, roofline_svg
from napkin.profiling.profile_table import ALL, STEP, headings, statements, table_rows
from napkin.profiling.step_profile import By, StepProfile
from napkin.report.colours import COLOURS
from napkin.report.templates import WITHOUT_CHARTS, render
from napkin.units import format_bytes, format_rate, format_seconds, format_share

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
    """(name, figure, note)."""
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
    found = profile.outside_by(lambda row: f"{row.name}, {row.phase}" if row.phase else row.name)
    return [(name, format_seconds(seconds), format_share(seconds / profile.seconds)) for name, seconds in found.items()]


def _ranks(profile: StepProfile) -> list[tuple[str, ...]]:
    names = ("seconds", "operators", "collectives", "outside")
    return [
        (str(number), *(format_seconds(each[name]) for name in names), format_share(each["overhead"]))
        for number, each in enumerate(profile.ranks)
    ]
