"""Collectives timed by size and number of ranks: processes on this machine, or the ranks that torchrun has started.

A fit says what they come to: seconds = α + bytes sent by each rank / bandwidth, the model of a plan's collectives
(`napkin.hardware.cluster`; Thakur et al. 2005).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import numpy as np

from napkin.accounting.rank_seconds import Collective
from napkin.benchmarking.case import Shape
from napkin.errors import NapkinError
from napkin.hardware.cluster import Operation
from napkin.hardware.rank_calibration import SIZES, Request, Samples, collective_samples, run_ranks
from napkin.hardware.sampling import Interval, median_interval
from napkin.units import format_bytes

COLLECTIVES: dict[str, Operation] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
}
DIMENSIONS = ("bytes", "ranks")
USUAL_RANKS = 2
# Course CS336 of Stanford, assignment 2: 1 MB to 1 GB among 2, 4 and 6 processes.
SWEEP: list[Shape] = [{"ranks": ranks, "bytes": 10**power} for ranks in (2, 4, 6) for power in (6, 7, 8, 9)]
MOST_RANKS = 256
BYTES_OF_A_PROCESS = 300e6
"""Bytes that a process with torch takes by itself; it also holds tensors of twice the bytes that a collective moves."""


@dataclass(frozen=True)
class CollectiveRow:
    """One collective of one size among so many ranks."""

    operation: Operation
    data_bytes: int
    """Bytes of the whole tensor: what each rank has after an all-gather, before a reduce-scatter, before and after an
    all-reduce; what each rank gives to an all-to-all."""
    ranks: int
    samples: tuple[float, ...] = ()
    """Seconds, of each call those of the slowest rank; none where it was not run."""
    refused: str = ""
    """Why it was not."""
    fitted_seconds: float | None = None

    @property
    def sent_bytes(self) -> float:
        """Bytes that each rank sends, in a ring."""
        return Collective(self.operation, "forward", self.data_bytes, group_size=self.ranks).sent_bytes

    @property
    def seconds(self) -> Interval | None:
        return median_interval(self.samples) if self.samples else None


@dataclass(frozen=True)
class AlphaBeta:
    """Seconds of a collective by the bytes that each rank sends."""

    start_seconds: float
    """α of the α–β model."""
    bandwidth: float
    """1/β, in bytes per second; infinite where bytes took no time that could be seen."""

    def seconds(self, sent_bytes: float) -> float:
        return self.start_seconds + sent_bytes / self.bandwidth


def fit_alpha_beta(points: Sequence[tuple[float, float]]) -> AlphaBeta:
    """α and β for pairs of bytes sent and seconds, by least squares of relative errors; neither is below 0.

    With a single size, all of its seconds are attributed to its bytes. Raises NapkinError without any.
    """
    if not points:
        raise NapkinError("there are no seconds to fit: measure at least one size")
    sent, seconds = (np.array(each, dtype=np.float64) for each in zip(*points, strict=True))
    terms = np.stack([1 / seconds, sent / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(terms, np.ones(len(points)), rcond=None)[0]
    if alpha < 0 or len(set(sent.tolist())) == 1:
        alpha, beta = 0.0, np.linalg.lstsq(terms[:, 1:], np.ones(len(points)), rcond=None)[0][0]
    elif beta <= 0:
        alpha, beta = np.linalg.lstsq(terms[:, :1], np.ones(len(points)), rcond=None)[0][0], 0.0
    return AlphaBeta(float(alpha), float(1 / beta) if beta else float("inf"))


def fitted(rows: Sequence[CollectiveRow]) -> tuple[list[CollectiveRow], dict[int, AlphaBeta]]:
    """The rows with the seconds that the fit for their number of ranks gives them, and the fits."""
    fits: dict[int, AlphaBeta] = {}
    for ranks in dict.fromkeys(row.ranks for row in rows):
        points = [(row.sent_bytes, row.seconds.median) for row in rows if row.ranks == ranks and row.seconds]
        if points:
            fits[ranks] = fit_alpha_beta(points)
    return [
        replace(row, fitted_seconds=fits[row.ranks].seconds(row.sent_bytes)) if row.samples else row for row in rows
    ], fits


def collective_shapes(shapes: Sequence[Shape], world_size: int | None = None) -> dict[int, list[int]]:
    """The sizes in bytes for each number of ranks; those that a shape does not name are the usual ones.

    `world_size` is that of the ranks that torchrun has started: no other number is possible then. Raises NapkinError
    for a number of ranks that is not.
    """
    by_ranks: dict[int, list[int]] = {}
    for shape in shapes or ({},):
        ranks = shape.get("ranks", world_size or USUAL_RANKS)
        if world_size is not None and ranks != world_size:
            raise NapkinError(f"--shapes ranks={ranks}, but torchrun has started {world_size}: leave ranks out")
        if not 2 <= ranks <= MOST_RANKS:
            raise NapkinError(f"--shapes ranks={ranks}: a collective has 2 to {MOST_RANKS} ranks")
        sizes = by_ranks.setdefault(ranks, [])
        sizes += [size for size in ([shape["bytes"]] if "bytes" in shape else SIZES) if size not in sizes]
    return by_ranks


def time_in_processes(
    operation: Operation,
    sizes: Mapping[int, Sequence[int]],
    *,
    threads: int,
    seconds: float,
    free_bytes: float,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> list[CollectiveRow]:
    """Rows for sizes by number of ranks, measured by as many processes of this machine through gloo.

    A row whose processes would need more than `free_bytes` says so and is not run. Raises NapkinError where a process
    fails, OSError where it cannot be started.
    """
    rows: list[CollectiveRow] = []
    for number, (ranks, wanted) in enumerate(sizes.items()):
        progress(number, len(sizes), f"{ranks} ranks")
        needed = {size: ranks * (BYTES_OF_A_PROCESS + 2 * size) for size in wanted}
        fits = tuple(size for size in wanted if needed[size] <= free_bytes)
        if fits:
            request = Request((operation,), fits, seconds)
            measured = run_ranks(msgspec.to_builtins(request), ranks, threads)
            rows += _rows(msgspec.convert(measured["collectives"], list[Samples]), ranks)
        for size in wanted:
            if size not in fits:
                refused = f"out of memory by plan: {format_bytes(needed[size])} of {format_bytes(free_bytes)}"
                rows.append(CollectiveRow(operation, size, ranks, refused=refused))
    return rows


def time_on_this_rank(
    operation: Operation,
    sizes: Mapping[int, Sequence[int]],
    rank: int,
    *,
    seconds: float,
    device_type: str,
    progress: Callable[[int, int], None],
) -> list[CollectiveRow]:
    """The same on one of the ranks of this process's group; all ranks call it, and all get the rows."""
    ((ranks, wanted),) = sizes.items()
    request = Request((operation,), tuple(wanted), seconds)
    return _rows(collective_samples(request, rank, ranks, device_type=device_type, progress=progress), ranks)


def _rows(samples: Sequence[Samples], ranks: int) -> list[CollectiveRow]:
    return [
        CollectiveRow(cast(Operation, each.operation), each.data_bytes, ranks, tuple(each.seconds)) for each in samples
    ]


def collective_values(row: CollectiveRow) -> dict[str, Any]:
    """A row for programs, in bytes and seconds."""
    values: dict[str, Any] = {
        "operation": row.operation,
        "bytes": row.data_bytes,
        "ranks": row.ranks,
        "sent_bytes": row.sent_bytes,
        "refused": row.refused or None,
        "samples": row.samples,
    }
    if row.seconds is not None:
        values |= {
            "seconds": vars(row.seconds),
            "algorithm_bandwidth": row.data_bytes / row.seconds.median,
            "bus_bandwidth": row.sent_bytes / row.seconds.median,
            "fitted_seconds": row.fitted_seconds,
        }
    return values
