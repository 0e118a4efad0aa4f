"""What devices send to each other in a step: its collectives, their bytes and seconds, and what computation hides."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from napkin.hardware.interconnect import Interconnect, Operation

Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and size, in one pass of a step, among all devices."""

    operation: Operation
    phase: Pass
    """The pass whose computation it overlaps with."""
    data_bytes: float
    """Of the whole tensor of one, as `Interconnect.seconds` takes it."""
    times: int = 1
    """How many of them a step has."""

    def sent_bytes(self, world_size: int) -> float:
        """Bytes that each device sends, in rings (Patarasuk & Yuan 2009)."""
        around = 2 if self.operation == "all_reduce" else 1
        return around * (world_size - 1) / world_size * self.data_bytes * self.times


@dataclass(frozen=True)
class Communication:
    """The collectives of one step, each among all devices."""

    collectives: tuple[Collective, ...] = ()
    world_size: int = 1

    @property
    def bytes(self) -> float:
        """Bytes that each device sends per step."""
        return self.bytes_in("forward") + self.bytes_in("backward")

    def bytes_in(self, phase: Pass) -> float:
        """Those of them that one pass can hide."""
        return sum(collective.sent_bytes(self.world_size) for collective in self._of(phase))

    def seconds(self, interconnect: Interconnect) -> float:
        """Seconds per step, hidden or not."""
        return self._seconds_in(interconnect, "forward") + self._seconds_in(interconnect, "backward")

    def exposed_seconds(self, interconnect: Interconnect, *, forward_seconds: float, backward_seconds: float) -> float:
        """Seconds by which communication lengthens a step of so many seconds of computation in each pass.

        A pass takes as long as the longer of the two, and `interconnect.slowdown` of the shorter: they share the
        device.
        """
        passes: dict[Pass, float] = {"forward": forward_seconds, "backward": backward_seconds}
        exposed = 0.0
        for phase, computing in passes.items():
            sending = self._seconds_in(interconnect, phase)
            exposed += max(0.0, sending - computing) + interconnect.slowdown * min(sending, computing)
        return exposed

    def _seconds_in(self, interconnect: Interconnect, phase: Pass) -> float:
        group = interconnect.group(self.world_size)
        return sum(
            collective.times * interconnect.seconds(collective.operation, collective.data_bytes, group)
            for collective in self._of(phase)
        )

    def _of(self, phase: Pass) -> Iterator[Collective]:
        return (collective for collective in self.collectives if collective.phase == phase)
