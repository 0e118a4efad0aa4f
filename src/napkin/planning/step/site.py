"""The devices of a run, with the figures of theirs that a plan states."""

from dataclasses import dataclass

from napkin.accounting.failures import RESTART_MINUTES
from napkin.hardware.cluster import Interconnect


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
    """What connects the devices; None where it is not known."""
    usd_per_hour: float | None = None
    """Of all devices; None where it is not known."""
    offer: str | None = None
    """That price for one device, whose offer it is and of which month; None for a price that was given."""
    watts: float | None = None
    """Of all devices; None where it is not known."""
    measured: bool = True
    """True if the peak was measured, False if it is the datasheet's."""
    disturbed: bool = False
    """Whether other processes used the machine while it was calibrated: seconds may be too high, peaks too low."""
    host_bandwidth: float | None = None
    """Bytes per second from one device into its host's memory; None where it is not known."""
    mtbf_hours: float | None = None
    """Between two failures of all devices together, on average; None is by the published rate."""
    restart_minutes: float = RESTART_MINUTES
    """From a failure until training continues."""

    @property
    def name(self) -> str:
        """The device's name, with the number of devices."""
        return self.device_name if self.n_devices == 1 else f"{self.n_devices} × {self.device_name}"
