"""Ceilings of a device's speed, which bound an operator's time: a measured calibration, or datasheet figures."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from napkin.hardware.device import Device

MATMUL_SHARE = 0.8
"""The fraction of a datasheet's dense peak that large matrix products reach: 795 of 989 TFLOP/s on H100 and H200, 1,745
of 2,250 on B200, as published for bf16."""

BANDWIDTH_SHARE = 0.85
"""The fraction of a datasheet's memory bandwidth that elementwise kernels reach; error correction and row changes take
the rest."""

KERNEL_SECONDS = 5e-6
"""The minimum time of a kernel when kernels are launched one after another from Python."""


@runtime_checkable
class Ceilings(Protocol):
    """The machine properties that `price` needs; `Calibration` and `CatalogueCeilings` implement them."""

    @property
    def seconds_per_operator(self) -> float:
        """The overhead of an operator call."""
        ...

    @property
    def seconds_per_fresh_byte(self) -> float:
        """The cost of a byte of newly mapped memory, in addition to writing it."""
        ...

    @property
    def calls_overlap(self) -> bool:
        """Whether operator calls overlap with the operators still running."""
        ...

    def matmul_peak(self, format_name: str) -> float:
        """The FLOP/s that MFU is relative to."""
        ...

    def matmul_rate(self, format_name: str, m: int, n: int, k: int) -> float:
        """The expected FLOP/s of an [m × k] @ [k × n]."""
        ...

    def bandwidth(self, bytes_touched: float | int) -> float:
        """The expected bytes/s of an operator that reads and writes `bytes_touched`."""
        ...


@dataclass(frozen=True)
class CatalogueCeilings:
    """The speed that PyTorch's kernels reach on a device of the catalogue: fixed fractions of its datasheet figures.

    Thin matrices are slow because of their bytes, which a roofline includes; partially filled tiles are not modelled.
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
