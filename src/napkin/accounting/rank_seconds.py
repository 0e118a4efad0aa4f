"""The seconds of a step on each rank, and which of them the others waited for.

`Communication` is what devices send to each other in a step: its collectives, their bytes and seconds, and what
computation hides.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from napkin.accounting.ledger import Ledger
from napkin.hardware.cluster import Interconnect, Operation
from napkin.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from napkin.accounting.collectives import CollectiveClock


MOST_LINES = 8
"""Ranks that are printed one by one."""

STRAGGLER_SHARE = 0.6
"""A rank is a straggler if it caused more than this fraction of all waiting,"""
STRAGGLER_SECONDS = 0.05
"""and the others waited for it for more than this fraction of a step on average."""


@dataclass(frozen=True)
class CollectiveSeconds:
    """All collectives of one kind in a step."""

    operation: str
    calls: int
    bytes: int
    seconds: float
    """Seconds, exposed or hidden."""


@dataclass(frozen=True)
class RankSeconds:
    """One rank's step, by what it did."""

    rank: int
    peak_bytes: int
    """Largest number of bytes in tensors, in the metered step."""
    seconds: float
    """Seconds of the step after the metered one, in which collectives were timed."""
    compute_seconds: float
    """Seconds in which the rank did not wait for a collective or another stage."""
    exposed_seconds: float
    """Waiting for collectives, for the last rank to enter included."""
    hidden_seconds: float
    """Seconds of collectives while the rank computed."""
    bubble_seconds: float
    """Waiting for another stage of the pipeline."""
    waiting_seconds: float
    """Part of the exposed seconds before the last rank had entered the collective."""
    collectives: tuple[CollectiveSeconds, ...] = ()


def rank_lines(
    ranks: Sequence[RankSeconds], straggler: int | None, *, pipeline_peak_bytes: Sequence[int]
) -> Iterator[str]:
    """A line for each rank; of many, those with the most and the least bytes and waiting. Last the straggler.

    `pipeline_peak_bytes` is what was planned for each rank of a pipeline.
    """
    for each in ranks_to_show(ranks, straggler):
        of_rank = planned_bytes(each.rank, len(ranks), pipeline_peak_bytes)
        planned = "" if of_rank is None else f" of {format_bytes(of_rank)} planned"
        bubble = f", bubble {format_seconds(each.bubble_seconds)}" if each.bubble_seconds else ""
        exposed, hidden = format_seconds(each.exposed_seconds), format_seconds(each.hidden_seconds)
        yield (
            f"rank {each.rank}: {format_bytes(each.peak_bytes)}{planned}; "
            f"computed {format_seconds(each.compute_seconds)}, "
            f"collectives {exposed} exposed and {hidden} hidden{bubble}, "
            f"{format_seconds(each.waiting_seconds)} of it waiting for the last rank"
        )
    if straggler is not None:
        yield f"rank {straggler} is the straggler: the others waited for it"


def planned_bytes(rank: int, n_ranks: int, pipeline_peak_bytes: Sequence[int]) -> int | None:
    """The bytes that were planned for a rank: ranks of a pipeline follow each other in groups of equal size.

    >>> planned_bytes(1, 4, [10, 20]), planned_bytes(2, 4, [10, 20])
    (10, 20)
    """
    places = len(pipeline_peak_bytes)
    return pipeline_peak_bytes[rank * places // n_ranks] if places else None


def ranks_to_show(ranks: Sequence[RankSeconds], straggler: int | None) -> list[RankSeconds]:
    """All of a few ranks; of many, rank 0, the straggler, and those with the most and the least bytes and waiting."""
    if len(ranks) <= MOST_LINES:
        return list(ranks)
    fields = "peak_bytes", "waiting_seconds"
    extremes = (key(ranks, key=attrgetter(field)) for key in (min, max) for field in fields)
    numbers = {0, *(each.rank for each in extremes), *([] if straggler is None else [straggler])}
    return [each for each in ranks if each.rank in numbers]


def step_report(clock: "CollectiveClock", peak_bytes: int, offset: float = 0.0) -> dict[str, Any]:
    """The report of a rank to the others on its step, as JSON; `offset` is subtracted from its clock."""
    calls = [
        [
            each.call.operation,
            each.call.data_bytes,
            list(each.call.ranks),
            each.entered - offset,
            each.exposed,
            each.seconds,
        ]
        for each in clock.collectives
    ]
    return {"peak_bytes": peak_bytes, "seconds": clock.seconds, "calls": calls}


def on_one_clock(everyone: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The times that ranks report, each by its own clock, converted to the clock of rank 0. A collective that two ranks
    wait for ends for both at the same time. The clocks differ by an offset but run at the same rate, as those of GPUs
    do, so that one offset per rank, the median over these ends, aligns them; clocks of hosts are not needed.
    """
    ends: list[dict[tuple[Any, ...], tuple[float, bool]]] = []
    for each, keys in zip(everyone, _keys(everyone), strict=True):
        calls = zip(keys, each["calls"], strict=True)
        ends.append({key: (entered + spent, waited > 0) for key, (*_, entered, waited, spent) in calls if key})
    ahead: dict[int, float] = {0: 0.0}
    reached = [0]
    for known in reached:
        for rank in range(len(everyone)):
            shared = ends[known].keys() & ends[rank].keys()
            if rank in ahead or not shared:
                continue
            both = [key for key in shared if ends[known][key][1] and ends[rank][key][1]]
            apart = (ends[rank][key][0] - ends[known][key][0] for key in both or shared)
            ahead[rank] = ahead[known] + statistics.median(apart)
            reached.append(rank)
    return [
        {**each, "calls": [[*call[:3], call[3] - ahead.get(rank, 0.0), *call[4:]] for call in each["calls"]]}
        for rank, each in enumerate(everyone)
    ]


def _keys(everyone: Sequence[dict[str, Any]]) -> list[list[tuple[Any, ...]]]:
    """For each call of each rank, a key of the collective that it is part of, the same on all participating ranks; ()
    for messages between two ranks."""
    keys: list[list[tuple[Any, ...]]] = []
    for each in everyone:
        keys.append([])
        times: defaultdict[tuple[int, ...], int] = defaultdict(int)
        for operation, _, ranks, *_ in each["calls"]:
            group = tuple(ranks)
            if operation in ("send", "receive"):
                keys[-1].append(())
                continue
            # All ranks of a group call its collectives in the same order.
            keys[-1].append((group, times[group]))
            times[group] += 1
    return keys


def seconds_of_ranks(everyone: Sequence[dict[str, Any]], *, pipelined: bool) -> tuple[list[RankSeconds], int | None]:
    """Each rank's seconds from what all have told, and the straggler, if there is one.

    `pipelined` is whether sends and receives are those of a pipeline's stages.
    """
    last_to_enter: dict[tuple[Any, ...], tuple[float, int]] = {}
    keys = _keys(everyone)
    for rank, each in enumerate(everyone):
        for key, (_, _, _, entered, *_) in zip(keys[rank], each["calls"], strict=True):
            if key:
                last_to_enter[key] = max(last_to_enter.get(key, (entered, rank)), (entered, rank))
    caused = [0.0] * len(everyone)
    by_rank: list[RankSeconds] = []
    for rank, (each, own_keys) in enumerate(zip(everyone, keys, strict=True)):
        exposed = hidden = bubble = waiting = 0.0
        kinds: dict[str, tuple[int, int, float]] = {}
        for (operation, data_bytes, _, entered, waited, seconds), key in zip(each["calls"], own_keys, strict=True):
            calls, sums, spent = kinds.get(operation, (0, 0, 0.0))
            kinds[operation] = (calls + 1, sums + data_bytes, spent + seconds)
            if pipelined and not key:
                bubble += waited
                continue
            exposed += waited
            hidden += seconds - waited
            if key:
                last, whom = last_to_enter[key]
                for_others = min(waited, max(0.0, last - entered))
                waiting += for_others
                caused[whom] += for_others
        computing = max(0.0, each["seconds"] - exposed - bubble)
        collectives = tuple(CollectiveSeconds(operation, *figures) for operation, figures in kinds.items())
        seconds = each["seconds"], computing, exposed, hidden, bubble, waiting
        by_rank.append(RankSeconds(rank, each["peak_bytes"], *seconds, collectives))
    return by_rank, _straggler(caused, max(each.seconds for each in by_rank))


def _straggler(caused: Sequence[float], step_seconds: float) -> int | None:
    worst = max(range(len(caused)), key=caused.__getitem__)
    others = max(1, len(caused) - 1)
    is_large = caused[worst] > STRAGGLER_SECONDS * step_seconds * others
    return worst if is_large and caused[worst] > STRAGGLER_SHARE * sum(caused) else None


Pass = Literal["forward", "backward", "optimizer"]


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and size, in one pass of a step."""

    operation: Operation
    phase: Pass
    """The pass whose computation it overlaps with; nothing overlaps with the optimizer's."""
    data_bytes: float
    """Bytes of the whole tensor of one such collective, as `Interconnect.seconds` takes it."""
    times: int = 1
    """Number of such collectives in a step."""
    group_size: int = 1
    """Ranks that take part."""
    stride: int = 1
    """Distance between their numbers."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends, in rings (Patarasuk & Yuan 2009)."""
        if self.operation == "send":
            return self.data_bytes * self.times
        around = 2 if self.operation == "all_reduce" else 1
        return around * (self.group_size - 1) / self.group_size * self.data_bytes * self.times


@dataclass(frozen=True)
class Communication:
    """The collectives of one rank's step."""

    collectives: tuple[Collective, ...] = ()

    @classmethod
    def of(cls, ledger: Ledger) -> "Communication":
        """The collectives counted in a rank's step; equal ones share one entry."""
        counted: Counter[Collective] = Counter()
        for row in ledger.rows:
            call = row.collective
            if call is None or call.operation == "receive":
                continue
            # A broadcast goes around the ring once, as an all-gather does.
            name = call.operation if call.operation in get_args(Operation) else "all_gather"
            phase = "backward" if row.phase == "recompute" else row.phase
            stride = abs(call.ranks[1] - call.ranks[0]) if call.group_size > 1 else 1
            collective = Collective(cast(Operation, name), phase, call.data_bytes, 1, call.group_size, stride)
            counted[collective] += 1
        return cls(tuple(replace(collective, times=times) for collective, times in counted.items()))

    def only(self, operation: Operation) -> "Communication":
        """The collectives of one kind."""
        return Communication(tuple(each for each in self.collectives if each.operation == operation))

    def without(self, operation: Operation) -> "Communication":
        """The collectives of all kinds but one."""
        return Communication(tuple(each for each in self.collectives if each.operation != operation))

    @property
    def times(self) -> int:
        return sum(collective.times for collective in self.collectives)

    @property
    def bytes(self) -> float:
        """Bytes that each device sends per step."""
        return sum(collective.sent_bytes for collective in self.collectives)

    def seconds(self, interconnect: Interconnect) -> float:
        """Seconds per step, hidden or not."""
        return sum(self._seconds_in(interconnect, phase) for phase in get_args(Pass))

    def exposed_seconds(self, interconnect: Interconnect, *, forward_seconds: float, backward_seconds: float) -> float:
        """Seconds by which communication lengthens a step of so many seconds of computation in each pass.

        A pass takes as long as the longer of the two, and `interconnect.slowdown` of the shorter: they share the
        device.
        """
        passes: dict[Pass, float] = {"forward": forward_seconds, "backward": backward_seconds}
        exposed = self._seconds_in(interconnect, "optimizer")
        for phase, computing in passes.items():
            sending = self._seconds_in(interconnect, phase)
            exposed += max(0.0, sending - computing) + interconnect.slowdown * min(sending, computing)
        return exposed

    def _seconds_in(self, interconnect: Interconnect, phase: Pass) -> float:
        return sum(
            collective.times
            * interconnect.seconds(
                collective.operation,
                collective.data_bytes,
                interconnect.group(collective.group_size, stride=collective.stride),
            )
            for collective in self._of(phase)
        )

    def _of(self, phase: Pass) -> Iterator[Collective]:
        return (collective for collective in self.collectives if collective.phase == phase)
