"""What bounds an operator's time on a device: a measured calibration, or what the catalogue promises of one."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from napkin.hardware.catalogue import Device

MATMUL_SHARE = 0.8
"""What large matrix products reach of a datasheet's dense peak: 795 of 989 TFLOP/s on H100 and H200, 1,745 of 2,250 on
B200, as published for bf16."""

BANDWIDTH_SHARE = 0.85
"""What elementwise kernels reach of a datasheet's memory bandwidth: error correction and row changes take the rest."""

KERNEL_SECONDS = 5e-6
"""The least that a kernel takes, started one after the other from Python."""


@runtime_checkable
class Ceilings(Protocol):
    """What `price` asks of a machine. `Calibration` has it too."""

    @property
    def seconds_per_operator(self) -> float:
        """The cost of calling an operator."""
        ...

    @property
    def seconds_per_fresh_byte(self) -> float:
        """The cost of a byte that the allocator takes from the system each time anew."""
        ...

    @property
    def calls_overlap(self) -> bool:
        """Whether an operator is called while the one before still runs, so that its call costs nothing more."""
        ...

    def matmul_peak(self, format_name: str) -> float:
        """FLOP/s that MFU is a share of."""
        ...

    def matmul_rate(self, format_name: str, m: int, n: int, k: int) -> float:
        """FLOP/s to expect of an [m × k] @ [k × n]."""
        ...

    def bandwidth(self, bytes_touched: float | int) -> float:
        """Bytes/s to expect of an operator that touches so many."""
        ...


@dataclass(frozen=True)
class CatalogueCeilings:
    """A device of the catalogue as PyTorch's kernels find it: shares of what its datasheet promises.

    Thin matrices are slow for their bytes, which a roofline knows; tiles that do not fill the device are not modelled.
    """

    device: Device
    seconds_per_operator: float = KERNEL_SECONDS
    seconds_per_fresh_byte: float = 0.0
    calls_overlap: bool = True

    def matmul_peak(self, format_name: str) -> float:
        """The datasheet's dense FLOP/s."""
        return self.device.peak(format_name)

    def matmul_rate(self, format_name: str, m: int, n: int, k: int) -> float:
        """`MATMUL_SHARE` of the peak, for any shape."""
        return MATMUL_SHARE * self.device.peak(format_name)

    def bandwidth(self, bytes_touched: float | int) -> float:
        """`BANDWIDTH_SHARE` of the datasheet's bytes/s, for any size."""
        return BANDWIDTH_SHARE * self.device.memory_bandwidth
