"""Counters and histograms in Prometheus' text format, version 0.0.4, which any collector reads.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """How many observations were at most each of some bounds."""

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
