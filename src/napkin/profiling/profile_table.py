"""The table of a profile: planned and measured seconds of each operator, module or phase, and what is in no row.

The calls of a step are also written as a trace for Perfetto or chrome://tracing, with phases and modules as ranges
around them.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from napkin.files import StrPath, atomic_write_text
from napkin.hardware.calibration import Calibration
from napkin.profiling.operator_calls import COMPILED
from napkin.profiling.step_profile import By, Figures, ProfiledSpan, StepProfile, named_by, summed
from napkin.units import format_bytes, format_rate, format_seconds, format_share

ALL = "in operators"
STEP = "step"
_MOST_OUTSIDE = 8


def headings(by: By) -> tuple[str, ...]:
    """The names of the columns; what lies between calls belongs to a module and a phase, but to no operator."""
    between = () if by == "operator" else ("between",)
    return by, "calls", "planned", "measured", "share", *between, "FLOP/s", "bytes/s", "of its roof"


def table_rows(profile: StepProfile, by: By, *, most: int) -> list[tuple[str, ...]]:
    """The rows of the table: the `most` longest, the others together, all, what is outside, the step.

    A module without a name is everything outside of modules.
    """
    sums = profile.by(by)
    names = list(sums)
    shown, rest = names[:most], names[most:]
    outside = {} if by == "operator" else profile.outside_by(lambda row: named_by(row, by))
    rows = [_row(profile, by, name or "(outside of modules)", sums[name], outside.get(name, 0.0)) for name in shown]
    if rest:
        between = sum((outside.get(name, 0.0) for name in rest), 0.0)
        rows.append(_row(profile, by, f"{len(rest)} others", summed(sums[name] for name in rest), between))
    return [*rows, *_totals(profile, by)]


def _totals(profile: StepProfile, by: By) -> Iterator[tuple[str, ...]]:
    blank = [""] * (len(headings(by)) - 5)
    yield _row(profile, by, ALL, profile.total, 0.0)
    outside = list(profile.outside_by(lambda row: row.name).items())
    shown, rest = outside[:_MOST_OUTSIDE], outside[_MOST_OUTSIDE:]
    if rest:
        shown.append((f"{len(rest)} others in no operator", sum(seconds for _, seconds in rest)))
    for name, seconds in shown:
        yield name, "", "", format_seconds(seconds), format_share(seconds / profile.seconds), *blank
    planned = format_seconds(profile.price.seconds) if profile.price else ""
    flops, touched = profile.total.flops / profile.seconds, profile.total.bytes_touched / profile.seconds
    rates = format_rate(flops), _bytes_rate(touched), ""
    yield STEP, "", planned, format_seconds(profile.seconds), "100%", *blank[3:], *rates


def _row(profile: StepProfile, by: By, name: str, figures: Figures, between: float) -> tuple[str, ...]:
    roof = figures.roof_share
    return (
        name,
        f"{figures.calls:,.0f}" if figures.calls == round(figures.calls) else f"{figures.calls:,.1f}",
        format_seconds(figures.planned_seconds) if profile.price else "",
        format_seconds(figures.seconds),
        format_share(figures.seconds / profile.seconds),
        *([] if by == "operator" else [format_seconds(between) if between else ""]),
        format_rate(figures.flops_per_second) if figures.flops_per_second else "",
        _bytes_rate(figures.bytes_per_second),
        f"{format_share(roof)} {figures.bound}" if roof else "",
    )


def _bytes_rate(rate: float) -> str:
    return f"{format_bytes(rate)}/s" if rate else ""


def statements(profile: StepProfile) -> list[str]:
    """Sentences that a reader of the figures should know."""
    n_steps = len(profile.profiled_seconds)
    whole = f"{format_seconds(profile.seconds)}, the mean of {n_steps} step{'s' * (n_steps > 1)}"
    on_cpu = profile.device_type == "cpu"
    lines = [
        f"{format_share(profile.explained)} of {whole}, is in operators"
        + (f"; with what else modules and functions take, {format_share(profile.located)}." if on_cpu else "."),
        _overhead(profile),
    ]
    if on_cpu:
        lines.append(
            "The seconds of a call include what torch takes to make it; Python is all that runs between calls: in "
            "custom autograd functions and optimizers, which are named, in modules, and outside of all."
        )
    else:
        lines.append("The seconds of an operator are those of its kernels; the device waits where none runs.")
    if profile.planned_ledger is not None:
        lines.append(
            "The planned seconds are the plan's, which distributes the time between operators over their rows."
        )
        if any(row.operator == COMPILED for row in profile.rows):
            lines.append("The plan's rows are those of the step before it is compiled.")
    elif profile.price is not None:
        lines.append("The planned seconds are those of each operator of the recorded step, run alone on this machine.")
    if profile.ranks:
        lines.append("Where a rank waits for others outside of an operator, that is Python too.")
    if profile.roofs is not None:
        peaks = ", ".join(f"{format_rate(rate)} in {name}" for name, rate in profile.roofs.peaks.items())
        memory = f"{format_bytes(profile.roofs.bandwidth)}/s to main memory"
        lines.append(f"The roofs, as measured on this machine: {', '.join(filter(None, [peaks, memory]))}.")
        if isinstance(profile.roofs.ceilings, Calibration) and profile.roofs.ceilings.disturbed:
            lines.append(
                "The machine was busy when they were measured: they may be too low, `napkin calibrate` measures again."
            )
    return lines


def _overhead(profile: StepProfile) -> str:
    pairs = profile.overheads
    sentence = f"With the profiler a step takes {_signed(profile.overhead)} than the one beside it without"
    if len(pairs) < 2:
        return f"{sentence}; of one pair, that may be chance."
    return f"{sentence}: the median of {len(pairs)} pairs, which range from {pairs[0]:+.1%} to {pairs[-1]:+.1%}."


def _signed(overhead: float) -> str:
    return f"{format_share(abs(overhead))} {'less' if overhead < 0 else 'longer'}"


# The format is Chrome's "Trace Event Format": JSON, times in microseconds.

_PHASES, _MODULES, _OPERATORS, _STREAMS = 1, 2, 3, 100
"""Numbers of the lines of the picture."""

Event = dict[str, Any]


def write_trace(profile: StepProfile, path: StrPath) -> Path:
    """Write the trace of a profiled step. Raises NapkinError where the file exists."""
    path = Path(path)
    atomic_write_text(path, json.dumps(trace_of(profile), separators=(",", ":")) + "\n")
    return path


def trace_of(profile: StepProfile) -> Event:
    """The trace as JSON values: the step, phases, modules within modules, operators, and kernels by stream."""
    host = [span for span in profile.trace if not span.kernel]
    kernels = [span for span in profile.trace if span.kernel]
    streams = sorted({span.stream for span in kernels})
    names = {_PHASES: "phases", _MODULES: "modules", _OPERATORS: "operators"}
    names |= {_STREAMS + stream: f"stream {stream} of {profile.device_name}" for stream in streams}
    events: list[Event] = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": f"napkin profile: {profile.title}"}},
        *({"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": n}} for tid, n in names.items()),
        _range("step", "step", 0, round(profile.trace_seconds * 1e9), _PHASES),
        *_ranges(host, lambda span: span.phase, "phase", _PHASES),
        *_module_ranges(host, 0),
        *(_operator(span, _OPERATORS) for span in host),
        *(_operator(span, _STREAMS + span.stream) for span in kernels),
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"device": profile.device_name}}


def _module_ranges(spans: Sequence[ProfiledSpan], depth: int) -> Iterator[Event]:
    """Calls that follow each other in the same module, of those that have one at this depth; then the modules in it."""
    for (name, phase), group in groupby(spans, key=lambda span: (_prefix(span.module, depth), span.phase)):
        inside = list(group)
        if name:
            yield _range(name, f"module, {phase}", inside[0].begin, max(span.end for span in inside), _MODULES)
            yield from _module_ranges(inside, depth + 1)


def _prefix(module: str, depth: int) -> str:
    parts = module.split(".") if module else []
    return ".".join(parts[: depth + 1]) if len(parts) > depth else ""


def _ranges(
    spans: Sequence[ProfiledSpan], key: Callable[[ProfiledSpan], str], category: str, line: int
) -> Iterator[Event]:
    for name, group in groupby(spans, key=key):
        inside = list(group)
        yield _range(name or "other", category, inside[0].begin, max(span.end for span in inside), line)


def _range(name: str, category: str, begin: int, end: int, line: int, **details: Any) -> Event:
    event = {"name": name, "cat": category, "ph": "X", "pid": 1, "tid": line}
    return {**event, "ts": begin / 1e3, "dur": (end - begin) / 1e3, **({"args": details} if details else {})}


def _operator(span: ProfiledSpan, line: int) -> Event:
    details: dict[str, Any] = {"operator": span.operator, "module": span.module, "phase": span.phase}
    if span.flops:
        details["FLOPs"] = span.flops
    if span.bytes_touched:
        details["bytes"] = span.bytes_touched
    category = "kernel" if span.kernel else "operator"
    return _range(span.kernel or span.operator, category, span.begin, span.end, line, **details)
