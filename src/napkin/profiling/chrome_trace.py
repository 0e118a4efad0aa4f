"""The calls of a step as a trace for Perfetto or chrome://tracing, with phases and modules as ranges around them.

The format is Chrome's "Trace Event Format": JSON, times in microseconds.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from napkin.files import StrPath, atomic_write_text
from napkin.profiling.step_profile import ProfiledSpan, StepProfile

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


def _range(name: str, category: str, begin: int, end: int, line: int, **told: Any) -> Event:
    event = {"name": name, "cat": category, "ph": "X", "pid": 1, "tid": line}
    return {**event, "ts": begin / 1e3, "dur": (end - begin) / 1e3, **({"args": told} if told else {})}


def _operator(span: ProfiledSpan, line: int) -> Event:
    told: dict[str, Any] = {"operator": span.operator, "module": span.module, "phase": span.phase}
    if span.flops:
        told["FLOPs"] = span.flops
    if span.bytes_touched:
        told["bytes"] = span.bytes_touched
    category = "kernel" if span.kernel else "operator"
    return _range(span.kernel or span.operator, category, span.begin, span.end, line, **told)
