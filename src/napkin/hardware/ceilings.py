"""Ceilings of a device's speed, which bound an operator's time: a measured calibration, or datasheet figures.

What PyTorch's kernels and collectives reach of a datasheet's figures is in efficiency.toml, by generation.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Protocol, runtime_checkable

import msgspec

from napkin.hardware.device import Device
from napkin.hardware.kernel_curves import FORMATS, Chip, ProductCurve, chip_of, curves_of, one_product_seconds
from napkin.toml_files import packaged_toml

# The coefficients stand in efficiency.toml, which `benchmarks/published_runs.py --fit` writes from published training
# runs; a generation that has none takes the geometric means of those that have, within a wider factor.

_Share = Annotated[float, msgspec.Meta(gt=0, le=1.2)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]

ELSEWHERE_FACTOR = 1.5
"""Within which the seconds are expected on devices of a generation without published runs; not verified."""


@dataclass(frozen=True)
class Efficiency:
    """Coefficients of the seconds of a step, of one generation."""

    matmul_share: _Share
    """Fraction of the dense peak that large matrix products reach."""
    matmul_width: _NotNegative
    """A product [m × k] @ [k × n] reaches 1 / (1 + width · (1/m + 1/n + 1/k)) of that: tiles are filled and left."""
    attention_share: _Share
    """Fraction of the dense peak that fused attention reaches at large head dimensions, over the pairs it computes."""
    attention_width: _NotNegative
    """Loss by narrow heads: at a head dimension of d it reaches 1 / (1 + width / d) of that: the softmax takes the
    rest."""
    attention_rows: _NotNegative
    """Loss by few queries: with r rows of queries, of all heads and sequences, it reaches 1 / (1 + rows / r) of that:
    the last tile of rows has all keys before it, and too few tiles leave processors idle."""
    memory_share: _Share
    """Fraction of the memory bandwidth that elementwise kernels reach."""
    fused_share: _Share
    """Fraction of the seconds of elementwise kernels that remains where a compiler, or hand-written kernels, fuse
    them."""
    kernel_seconds: _NotNegative
    """Seconds of each kernel, in addition to its FLOPs or bytes: launch, first load and last store."""
    link_share: _Share
    """Fraction of the link's bandwidth that collectives reach."""
    network_share: _Share
    """Fraction of the network's bandwidth that collectives reach."""
    hop_factor: _NotNegative
    """Latency of a hop, over that of `napkin.hardware.cluster`."""
    slowdown: _NotNegative
    """Seconds by which one second of overlapped communication lengthens the computation: its kernels and its memory
    traffic share the device."""
    factor: Annotated[float, msgspec.Meta(ge=1)]
    """Factor of uncertainty: in nine cases of ten a step is expected within it."""
    cudnn_attention_share: _Share | None = None
    """`attention_share` of cuDNN's attention, which torch prefers from Hopper on; None is the same share."""
    fp8_share: _Share | None = None
    """Fraction of the dense fp8 peak that large products reach; None is `matmul_share`."""
    product_share: _Share | None = None
    """The fraction of their stand-alone speed (`napkin.hardware.kernel_curves`) that bf16 products reach in a training
    run, where the device is hot for hours and other kernels run beside them; None uses `matmul_share` of the peak
    instead."""
    collective_share: _Share | None = None
    """The share of their speed alone that collectives within a node reach, which wait for the slowest rank and share
    the device with products; None is `link_share` of the link and `hop_factor` instead."""
    usual_network: _NotNegative | None = None
    """Bytes per second and device between the nodes of the runs that `network_share` was fitted to; None makes it the
    share of any network."""
    rows: int = 0
    """Published runs that they were fitted to."""
    residual: float | None = None
    """Median relative error of the seconds of published runs that they were not fitted to."""
    compute_capabilities: tuple[tuple[int, int], ...] = field(default=())
    """NVIDIA's numbers of the generation."""


COEFFICIENTS = tuple(each.name for each in dataclasses.fields(Efficiency) if each.default is dataclasses.MISSING)[:-1]
"""Names of the coefficients that every generation has, without `factor`."""


@functools.cache
def efficiencies() -> dict[str, Efficiency]:
    """Coefficients by the name of the generation."""
    return packaged_toml("napkin.hardware", "efficiency.toml", dict[str, Efficiency])


def efficiency_of(device: Device) -> Efficiency:
    """The coefficients of a device: its generation's, else the geometric means of all generations; in their place those
    that were measured on it, which a file that describes the device may have."""
    efficiency = next(
        (each for each in efficiencies().values() if device.compute_capability in each.compute_capabilities), None
    )
    return dataclasses.replace(efficiency or mean_efficiency(), **device.efficiency)


@functools.cache
def mean_efficiency() -> Efficiency:
    """The geometric means of all generations."""
    generations = efficiencies().values()
    means = {
        name: math.prod(getattr(each, name) for each in generations) ** (1 / len(generations)) for name in COEFFICIENTS
    }
    return Efficiency(**means, factor=ELSEWHERE_FACTOR)


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
        """True if operator calls overlap with the operators still running."""
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

    def product_seconds(self, format_name: str, batch: int, m: int, n: int, k: int) -> float | None:
        """The seconds of one kernel with `batch` such products, by a curve; None without a curve."""
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
    """Fractions that replace those of the device's generation, where not None."""
    seconds_per_fresh_byte: float = 0.0
    calls_overlap: bool = True

    @cached_property
    def efficiency(self) -> Efficiency:
        """The fractions of the datasheet's figures that kernels reach."""
        return self.efficiency_used or efficiency_of(self.device)

    @property
    def seconds_per_operator(self) -> float:
        """Fixed time of a kernel, in addition to that of its FLOPs or bytes."""
        return self.efficiency.kernel_seconds

    @property
    def fused_share(self) -> float:
        """The share of published runs with and without fused kernels."""
        return self.efficiency.fused_share

    def matmul_peak(self, format_name: str) -> float:
        return self.device.peak(format_name)

    def matmul_rate(self, format_name: str, m: int, n: int, k: int) -> float:
        """A share of the peak that falls where m, n or k is small."""
        efficiency = self.efficiency
        filled = 1 + efficiency.matmul_width * (1 / m + 1 / n + 1 / k)
        fp8 = efficiency.fp8_share if format_name.startswith("fp8") else None
        return (fp8 or efficiency.matmul_share) * self.device.peak(format_name) / filled

    def product_seconds(self, format_name: str, batch: int, m: int, n: int, k: int) -> float | None:
        """Return seconds by the curve of the device's generation; None where a share of its peak was measured."""
        if self._product_curve is None or format_name not in self._chips:
            return None
        curve, share = self._product_curve
        return one_product_seconds(curve, self._chips[format_name], batch, m, n, k, math.inf) / share

    @cached_property
    def _product_curve(self) -> tuple[ProductCurve, float] | None:
        share, curves = self.efficiency.product_share, curves_of(self.device)
        if share is None or curves is None or "matmul_share" in self.device.efficiency:
            return None
        return curves.product, share

    @cached_property
    def _chips(self) -> dict[str, Chip]:
        return {name: chip_of(self.device, name) for name in FORMATS if name in self.device.peaks}

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
