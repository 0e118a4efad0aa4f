"""The devices of a run, with the figures of theirs that a plan states; and when a step fits into their memory."""

from dataclasses import dataclass

from napkin.accounting.failures import RESTART_MINUTES
from napkin.hardware.cluster import Interconnect
from napkin.units import format_bytes

FREE_SHARE = 0.05
"""Part of a device's memory that a step is to leave free, in every plan and every search. A plan counts the bytes of
tensors. A run also needs what its allocator cannot reuse between them, buffers of collectives and of libraries, and
memory that other programs take meanwhile: some percent, which no count can know."""


def step_memory(memory_bytes: float) -> int:
    """Bytes that a step may take on a device with so many for tensors: all but `FREE_SHARE`."""
    return int((1 - FREE_SHARE) * memory_bytes)


def fits(peak_bytes: float, memory_bytes: float, *, reserved_bytes: float | None = None) -> bool:
    """True if a step of that peak fits: the one answer of plans, of searches and of what refuses a run.

    What a caching allocator reserves for it, where that is given, must fit into the whole memory.
    """
    return peak_bytes <= step_memory(memory_bytes) and (reserved_bytes or 0) <= memory_bytes


def memory_of(device_name: str, memory_bytes: float) -> str:
    """The memory that a step may take on a device, for messages."""
    allowed = format_bytes(step_memory(memory_bytes))
    return f"{device_name} has {allowed} for a step ({format_bytes(memory_bytes)} less {FREE_SHARE:.0%})"


@dataclass(frozen=True)
class Site:
    """The devices of a run: one, or several of the same kind that split the batch."""

    device_name: str
    matmul_peak: float
    """Dense FLOP/s of one device in the format of the matrix products."""
    memory_bytes: int
    """Memory of one device that is available for tensors."""
    bytes_per_second: float
    """Memory bandwidth of one device."""
    n_devices: int = 1
    interconnect: Interconnect | None = None
    """The links between the devices; None where they are not known."""
    usd_per_hour: float | None = None
    """Price of all devices per hour; None if unknown."""
    offer: str | None = None
    """The price of one device, with the provider and the month of the offer; None if the user gave a price."""
    watts: float | None = None
    """Power of all devices in watts; None if unknown."""
    measured: bool = True
    """True if the peak was measured, False if it is the datasheet's."""
    disturbed: bool = False
    """True if other processes used the machine while it was calibrated: seconds may be too high, peaks too low."""
    host_bandwidth: float | None = None
    """Bytes per second from one device into its host's memory; None where it is not known."""
    mtbf_hours: float | None = None
    """Mean time between failures of all devices together; None takes the published rate."""
    restart_minutes: float = RESTART_MINUTES
    """Minutes from a failure until training continues."""

    @property
    def name(self) -> str:
        """The device's name, with the number of devices."""
        return self.device_name if self.n_devices == 1 else f"{self.n_devices} × {self.device_name}"
