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

ELSEWHERE_FACTOR = 1.5
"""Within which the seconds are expected on devices of a generation without published runs; not verified."""


@dataclass(frozen=True)
class Efficiency:
    """Coefficients of the seconds of a step, of one generation."""

    matmul_share: _Share
    """Fraction of the dense peak that large matrix products reach."""
    matmul_width: float
    """A product [m × k] @ [k × n] reaches 1 / (1 + width · (1/m + 1/n + 1/k)) of that: tiles are filled and left."""
    attention_share: _Share
    """Fraction of the dense peak that fused attention reaches at large head dimensions, over the pairs it computes."""
    attention_width: float
    """At a head dimension of d it reaches 1 / (1 + width / d) of that: the softmax takes the rest."""
    memory_share: _Share
    """Fraction of the memory bandwidth that elementwise kernels reach."""
    kernel_seconds: float
    """Of each kernel, in addition to its FLOPs or bytes: launch, first load and last store."""
    link_share: _Share
    """Fraction of the link's bandwidth that collectives reach."""
    network_share: _Share
    """The same between nodes."""
    hop_factor: float
    """Latency of a hop, over that of `napkin.hardware.interconnect`."""
    slowdown: float
    """Seconds by which one second of overlapped communication lengthens the computation: its kernels and its memory
    traffic share the device."""
    factor: float
    """In nine cases of ten a step is expected within this factor."""
    rows: int = 0
    """Published runs that they were fitted to."""
    compute_capabilities: tuple[tuple[int, int], ...] = field(default=())
    """NVIDIA's numbers of the generation."""


@functools.cache
def efficiencies() -> dict[str, Efficiency]:
    """Coefficients by the name of the generation."""
    text = resources.files("napkin.hardware").joinpath("efficiency.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Efficiency])


def efficiency_of(device: Device) -> Efficiency:
    """The coefficients of a device: its generation's, else the geometric means of all generations."""
    for efficiency in efficiencies().values():
        if device.compute_capability in efficiency.compute_capabilities:
            return efficiency
    return _mean(tuple(efficiencies().values()))


def _mean(found: tuple[Efficiency, ...]) -> Efficiency:
    names = [each.name for each in dataclasses.fields(Efficiency) if each.type is not int][:10]
    means = {name: math.prod(getattr(each, name) for each in found) ** (1 / len(found)) for name in names}
    return Efficiency(**means, factor=ELSEWHERE_FACTOR)
