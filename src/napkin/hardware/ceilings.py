"""Ceilings of a device's speed, which bound an operator's time: a measured calibration, or datasheet figures."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from napkin.hardware.device import Device
from napkin.hardware.efficiency import Efficiency, efficiency_of


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

    @property
    def fused_share(self) -> float:
        """Fraction of the seconds of elementwise operators that remains where they are fused."""
        ...

    def matmul_peak(self, format_name: str) -> float:
        """The FLOP/s that MFU is relative to."""
        ...

    def matmul_rate(self, format_name: str, m: int, n: int, k: int) -> float:
        """The expected FLOP/s of an [m × k] @ [k × n]."""
        ...

    def attention_rate(
        self, format_name: str, queries: int, keys: int, head_dim: int, *, heads: int = 1, cudnn: bool = False
    ) -> float:
        """The expected FLOP/s of fused attention, over the pairs of queries and keys that it computes.

        `heads` is their number in all sequences together; `cudnn` is whether the kernel is cuDNN's.
        """
        ...

    def bandwidth(self, bytes_touched: float | int) -> float:
        """The expected bytes/s of an operator that reads and writes `bytes_touched`."""
        ...


@dataclass(frozen=True)
class CatalogueCeilings:
    """The speed that PyTorch's kernels reach on a device of the catalogue: its datasheet, times its efficiency."""

    device: Device
    efficiency_used: Efficiency | None = None
    """None is that of the device's generation."""
    seconds_per_fresh_byte: float = 0.0
    calls_overlap: bool = True

    @cached_property
    def efficiency(self) -> Efficiency:
        """The fractions of the datasheet's figures that kernels reach."""
        return self.efficiency_used or efficiency_of(self.device)

    @property
    def seconds_per_operator(self) -> float:
        """The time of a kernel beside its FLOPs or bytes."""
        return self.efficiency.kernel_seconds

    @property
    def fused_share(self) -> float:
        """As published runs with and without fused kernels have it."""
        return self.efficiency.fused_share

    def matmul_peak(self, format_name: str) -> float:
        """The datasheet's dense FLOP/s."""
        return self.device.peak(format_name)

    def matmul_rate(self, format_name: str, m: int, n: int, k: int) -> float:
        """A share of the peak that falls where m, n or k is small."""
        efficiency = self.efficiency
        filled = 1 + efficiency.matmul_width * (1 / m + 1 / n + 1 / k)
        fp8 = efficiency.fp8_share if format_name.startswith("fp8") else None
        return (fp8 or efficiency.matmul_share) * self.device.peak(format_name) / filled

    def attention_rate(
        self, format_name: str, queries: int, keys: int, head_dim: int, *, heads: int = 1, cudnn: bool = False
    ) -> float:
        """A share of the peak that falls where heads are narrow, or rows of queries few."""
        efficiency = self.efficiency
        share = (efficiency.cudnn_attention_share if cudnn else None) or efficiency.attention_share
        narrow = 1 + efficiency.attention_width / head_dim
        filled = narrow * (1 + efficiency.attention_rows / (heads * queries))
        return share * self.device.peak(format_name) / filled

    def bandwidth(self, bytes_touched: float | int) -> float:
        """A share of the datasheet's bytes/s, for any size."""
        return self.efficiency.memory_share * self.device.memory_bandwidth
