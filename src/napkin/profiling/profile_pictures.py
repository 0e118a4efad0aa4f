"""Pictures of a profile: operators under the roofs, and memory over the time of a step, beside what was planned."""

from collections.abc import Sequence

import numpy as np

from napkin.accounting.ledger import Ledger, Moment
from napkin.accounting.pricing import numbered_alike
from napkin.profiling.matching import matched_rows
from napkin.profiling.step_profile import Figures, StepProfile
from napkin.report.xy_picture import Series, xy_svg
from napkin.units import format_bytes, format_rate, format_seconds

WIDTH = 800
_MOST_MOMENTS = 1500
_ROOFS = ("vermilion", "orange", "purple")
_PHASES = {"forward": "sky", "backward": "blue", "optimizer": "green", "recompute": "purple"}
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
    for phase, colour in _PHASES.items():
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
    """Those of the plan, at the time of the same operators in the step that ran."""
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
