"""What devices send to each other in a step: its collectives, their bytes and seconds, and what computation hides."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from napkin.accounting.ledger import Ledger
from napkin.hardware.interconnect import Interconnect, Operation

Pass = Literal["forward", "backward", "optimizer"]


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and size, in one pass of a step."""

    operation: Operation
    phase: Pass
    """The pass whose computation it overlaps with; none in the optimizer's."""
    data_bytes: float
    """Of the whole tensor of one, as `Interconnect.seconds` takes it."""
    times: int = 1
    """How many of them a step has."""
    group_size: int = 1
    """Ranks that take part."""
    stride: int = 1
    """By which their numbers differ."""

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
        """The collectives that a rank's step was counted to have; alike ones are one entry."""
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
        """All but those."""
        return Communication(tuple(each for each in self.collectives if each.operation != operation))

    @property
    def times(self) -> int:
        """How many collectives a step has."""
        return sum(collective.times for collective in self.collectives)

    @property
    def bytes(self) -> float:
        """Bytes that each device sends per step."""
        return sum(collective.sent_bytes for collective in self.collectives)

    def bytes_in(self, phase: Pass) -> float:
        """Those of them that one pass sends."""
        return sum(collective.sent_bytes for collective in self._of(phase))

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
