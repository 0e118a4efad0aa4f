"""The share of a datasheet's figures that the steps of an inference server reach, by server.

The constants stand in service_efficiency.toml, which `benchmarks/published_serving.py --fit` writes from published
measurements of servers under a constant number of concurrent requests.
"""

import dataclasses
import functools
import math
import statistics
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from napkin.errors import NapkinError, suggestion
from napkin.hardware.ceilings import efficiencies
from napkin.hardware.device import Device
from napkin.toml_files import packaged_toml

_Share = Annotated[float, msgspec.Meta(gt=0, le=2)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Factor = Annotated[float, msgspec.Meta(ge=1)]

HOST_SPREAD = 0.3
"""Standard deviation of the logarithm of what a server's own code takes on another host. Assumed."""
REQUEST_SPREAD = 0.5
"""Standard deviation of the logarithm of what is around a request: HTTP, tokenizing, the client. Assumed."""


@dataclass(frozen=True)
class Schedule:
    """How a server composes its steps with its default settings."""

    prompts_first: bool
    """True if prompts are computed in steps of their own, for which sequences that are generated wait; else a step
    has both."""
    cuts_prompts: bool
    """True if a step computes a part of a prompt, where the whole does not fit."""
    max_batched_tokens: Annotated[int, msgspec.Meta(gt=0)]
    """The most tokens that one step computes, by default."""
    max_running: Annotated[int, msgspec.Meta(gt=0)]
    """The most sequences that are computed at a time."""
    reserved_output: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Share of the tokens to be generated that must have room in the cache where a request is admitted. Below 1, one
    that came late gives its place back when the cache is full, and is computed again."""


@dataclass(frozen=True)
class ServiceEfficiency:
    """Constants of the seconds of a server's steps, and how it schedules."""

    weight_share: _Share
    """Fraction of the memory bandwidth that reading weights reaches."""
    kv_share: _Share
    """Fraction of the memory bandwidth that reading keys and values reaches."""
    product_share: _Share
    """Fraction of the dense peak that the products of a prompt reach."""
    attention_share: _Share
    """Fraction of the dense bf16 peak that the attention of a prompt reaches, over the pairs that a causal mask
    leaves."""
    activation_share: _NotNegative
    """Fraction of the counted bytes of elementwise operators that remains where they are fused."""
    layer_seconds: _NotNegative
    """Seconds of each layer in each step: launches, and first loads and last stores of kernels."""
    step_seconds: _NotNegative
    """Seconds of each step: scheduling, sampling, and what is between two steps."""
    sequence_seconds: _NotNegative
    """Seconds of each sequence in each step."""
    request_seconds: _NotNegative
    """Seconds of a request until its first token arrives, apart from the steps that it waits for: HTTP, tokenizing."""
    collective_seconds: _NotNegative
    """Seconds of an all-reduce of few bytes."""
    direct_share: Annotated[float, msgspec.Meta(gt=0, le=4)]
    """Bandwidth of an all-reduce in which each rank sends all its bytes to each other rank, as a fraction of what
    collectives reach in training (`Efficiency.link_share`); above 1 where they are sent once and summed in the
    switch."""
    ring_share: _Share
    """The same fraction of an all-reduce of many bytes, in two parts: reduce-scatter and all-gather."""
    schedule: Schedule
    memory_share: _Share
    """Fraction of the memory that is used."""
    memory_share_is_of_rest: bool
    """True if that is a fraction of what the weights leave, not of all memory."""
    tpot_factor: _Factor
    """Nine in ten published times per output token are within this factor."""
    ttft_factor: _Factor
    """Nine in ten published times to first token are within this factor."""
    rows: int = 0
    """Measurements that the constants were fitted to."""
    tpot_residual: float | None = None
    """Median relative error of the time per output token."""
    ttft_residual: float | None = None
    """Median relative error of the time to first token."""
    devices: tuple[str, ...] = field(default=())
    """Names of the devices that were measured."""
    formats: tuple[str, ...] = field(default=())
    """Formats of weights that were measured."""
    generations: dict[str, dict[str, float]] = field(default_factory=dict, hash=False)
    """Constants that were fitted to the devices of one generation alone, by NVIDIA's number of the generation: the
    constants above are those of all devices."""

    def on(self, device: Device) -> "ServiceEfficiency":
        """The constants of a device's generation; those of all where it was not measured."""
        capability = device.compute_capability
        name = "" if capability is None else ".".join(map(str, capability))
        return dataclasses.replace(self, **self.generations.get(name, {}))


@functools.cache
def service_efficiencies() -> dict[str, ServiceEfficiency]:
    """The constants by name of the server."""
    return packaged_toml("napkin.hardware", "service_efficiency.toml", dict[str, ServiceEfficiency])


def efficiency_of_server(server: str, device: Device) -> ServiceEfficiency:
    """The constants of a server by its name, on a device.

    Raises NapkinError for a server without constants.
    """
    known = service_efficiencies()
    if server not in known:
        raise NapkinError(f"{server!r} is not a server with measurements: {suggestion(server, known)}")
    return known[server].on(device)


FITTED = tuple(each.name for each in dataclasses.fields(ServiceEfficiency))[:12]
"""Names of the constants that are fitted."""


@functools.cache
def generation_spread() -> dict[str, float]:
    """The spread of each constant on a generation that was not measured: the standard deviation of its logarithm.

    Those of kernels and links are what the generations of hardware/efficiency.toml differ by, found in training runs;
    those of a host are assumed.
    """

    def between(name: str) -> float:
        return statistics.stdev(math.log(getattr(each, name)) for each in efficiencies().values())

    memory, link = between("memory_share"), between("link_share")
    return {
        "weight_share": memory,
        "kv_share": between("attention_share"),
        "product_share": between("matmul_share"),
        "attention_share": between("attention_share"),
        "activation_share": memory,
        "layer_seconds": between("kernel_seconds"),
        "step_seconds": HOST_SPREAD,
        "sequence_seconds": HOST_SPREAD,
        "request_seconds": REQUEST_SPREAD,
        "collective_seconds": between("hop_factor"),
        "direct_share": link,
        "ring_share": link,
    }
