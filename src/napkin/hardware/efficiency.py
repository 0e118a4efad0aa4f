"""How much of a datasheet's figures PyTorch's kernels and collectives reach, by generation of accelerator.

The coefficients stand in efficiency.toml, which `benchmarks/published_runs.py --fit` writes from published training
runs; a generation that has none takes the geometric means of those that have, within a wider factor.
"""

import dataclasses
import functools
import math
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from typing import Annotated

import msgspec

from napkin.hardware.device import Device

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
    """At a head dimension of d it reaches 1 / (1 + width / d) of that: the softmax takes the rest."""
    attention_rows: _NotNegative
    """With r rows of queries, of all heads and sequences, it reaches 1 / (1 + rows / r) of that: the last tile of rows
    has all keys before it, and too few tiles leave processors idle."""
    memory_share: _Share
    """Fraction of the memory bandwidth that elementwise kernels reach."""
    fused_share: _Share
    """Fraction of the seconds of elementwise kernels that remains where a compiler, or hand-written kernels, fuse
    them."""
    kernel_seconds: _NotNegative
    """Of each kernel, in addition to its FLOPs or bytes: launch, first load and last store."""
    link_share: _Share
    """Fraction of the link's bandwidth that collectives reach."""
    network_share: _Share
    """The same between nodes."""
    hop_factor: _NotNegative
    """Latency of a hop, over that of `napkin.hardware.interconnect`."""
    slowdown: _NotNegative
    """Seconds by which one second of overlapped communication lengthens the computation: its kernels and its memory
    traffic share the device."""
    factor: Annotated[float, msgspec.Meta(ge=1)]
    """In nine cases of ten a step is expected within this factor."""
    cudnn_attention_share: _Share | None = None
    """The same as `attention_share`, of cuDNN's attention, which torch prefers from Hopper on; None is that."""
    fp8_share: _Share | None = None
    """Fraction of the dense fp8 peak that large products reach; None is `matmul_share`."""
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
    text = resources.files("napkin.hardware").joinpath("efficiency.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Efficiency])


def efficiency_of(device: Device) -> Efficiency:
    """The coefficients of a device: its generation's, else the geometric means of all generations; in their place those
    that were measured on it, which a file that describes the device may have."""
    found = next(
        (each for each in efficiencies().values() if device.compute_capability in each.compute_capabilities), None
    )
    return dataclasses.replace(found or mean_efficiency(), **device.efficiency)


@functools.cache
def mean_efficiency() -> Efficiency:
    """The geometric means of all generations."""
    found = efficiencies().values()
    means = {name: math.prod(getattr(each, name) for each in found) ** (1 / len(found)) for name in COEFFICIENTS}
    return Efficiency(**means, factor=ELSEWHERE_FACTOR)
