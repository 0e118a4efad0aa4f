"""Limits of a server. Does not import torch: the command line reads this class for its help.

Counters and histograms in Prometheus' text format, version 0.0.4, which any collector reads.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from napkin.errors import NapkinError


@dataclass(frozen=True)
class Limits:
    """Limits for clients; a request that exceeds one is refused with an error that names it."""

    max_body_bytes: int = 8 * 2**20
    """Bytes of a request; more is answered with status 413."""

    max_tokens_per_request: int | None = None
    """Tokens of prompt and completion, all choices of a request together; None is what the model can take, for each."""

    max_requests: int = 256
    """Sequences in flight, running and waiting; more are answered with status 429 and Retry-After."""

    max_connections: int = 1024
    """Open connections. For one more, that one is closed which has waited longest for a request to be whole; where all
    of them have one, more requests are answered with status 503, but for /health."""

    request_seconds: float = 600.0
    """Seconds after which a request ends, with status 504 or an error in its stream."""

    stalled_seconds: float = 30.0
    """Seconds in which a client has to send a whole request, header and body, and for which it may not read what was
    sent, before its connection is closed."""

    drain_seconds: float = 30.0
    """Seconds that requests have to finish after SIGTERM."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # NaN fails the comparison.
            if value is not None and not 0 < value < math.inf and not (field.name == "drain_seconds" and value == 0):
                raise NapkinError(f"{field.name} is {value}: use a finite number above 0")


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Counts of the observations that were at most each of some bounds."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self._name, self._about, self._bounds = name, about, tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        """The metric as text."""
        yield from _head(self._name, self._about, "histogram")
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self._name}_bucket{{le="{bound}"}} {total}'
        yield f"{self._name}_sum {self._sum!r}"
        yield f"{self._name}_count {total}"


class Counter:
    """Numbers that only grow, one per value of a label."""

    def __init__(self, name: str, about: str, label: str, values: Sequence[str]) -> None:
        self._name, self._about, self._label = name, about, label
        self._counts = dict.fromkeys(values, 0)

    def add(self, value: str, count: int = 1) -> None:
        """Count for a value of the label, which was named at the beginning: a client cannot make new ones."""
        assert value in self._counts
        self._counts[value] += count

    def lines(self) -> Iterator[str]:
        """The metric as text."""
        yield from _head(self._name, self._about, "counter")
        for value, count in self._counts.items():
            yield f'{self._name}{{{self._label}="{value}"}} {count}'


def number_lines(name: str, about: str, kind: str, value: float) -> Iterator[str]:
    """A metric of one number that something else counts: `kind` is counter or gauge."""
    yield from _head(name, about, kind)
    yield f"{name} {value!r}"


def _head(name: str, about: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
