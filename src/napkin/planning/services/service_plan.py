"""The plan of a service: memory, latencies and rates by degree of tensor parallelism.

`service_planner` makes them: of an accelerator's datasheet by `device_service`, of this machine by `engine_service`.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from napkin.accounting.quantities import Line, Summary
from napkin.hardware.cluster import Cluster
from napkin.inference.service_load import ServiceLoad
from napkin.model.config import ModelConfig
from napkin.planning.services.draft_plan import DraftPlan
from napkin.planning.services.replica import ServiceTimes, ServiceWork
from napkin.planning.services.server_schedule import Load
from napkin.planning.services.this_machine import Simulation
from napkin.units import format_bytes, format_seconds


@dataclass(frozen=True)
class ServiceInterval:
    """Factors, up or down, that nine in ten measurements are expected within."""

    tpot: float
    ttft: float
    measured: bool
    """True if such a device was measured with weights in this format, and without experts."""


@dataclass(frozen=True)
class ServiceDegree:
    """The devices as replicas of so many ranks of tensor each. Bytes are of one device, times are of a request."""

    tensor: int
    replicas: int
    weight_bytes: float
    kv_pool_bytes: float
    """Bytes left for the KV cache; below 0 if the weights do not fit."""
    kv_bytes_per_sequence: float
    """Bytes of a sequence at its longest."""
    sequences: int
    """Number of such requests whose cache fits into a replica."""
    decode_flops: float
    """FLOPs of one decode step of a replica, all its ranks together."""
    decode_bytes: float
    """Bytes of weights and cache that each of its ranks reads in that step."""
    times: ServiceTimes | None
    """None where the service does not fit, or where the links are not known: `reason` says so."""
    interval: ServiceInterval | None
    tokens_per_second: float | None
    """Output tokens of all replicas."""
    usd_per_million_tokens: float | None
    """Price of a million output tokens; None without a price of the device."""
    tokens_per_second_interval: tuple[float, float] | None = None
    """If both times are as long, or as short, as their intervals say."""
    reason: str | None = None
    simulation: Simulation | None = None
    """The times of each simulated request."""

    @property
    def decode_intensity(self) -> float:
        return self.decode_flops / (self.decode_bytes * self.tensor)

    def as_values(self) -> dict[str, Any]:
        """The degree for programs; the times that were simulated by their percentiles."""
        values = dataclasses.asdict(dataclasses.replace(self, simulation=None))
        del values["simulation"]
        values["decode_intensity"] = self.decode_intensity
        if (seen := self.simulation) is not None:
            percents = (50, 90, 95, 99)
            values["time_to_first_token"] = {percent: seen.first_token(percent) for percent in percents}
            values["time_per_output_token"] = {percent: seen.per_token(percent) for percent in percents}
        return values


@dataclass(frozen=True, repr=False)
class ServicePlan(Summary):
    """The plan of serving a model, by degree of tensor parallelism."""

    model: ModelConfig
    work: ServiceWork
    cluster: Cluster | None
    """None is this machine."""
    server: str
    """Name of the server; "napkin" is napkin's own engine."""
    weights: str
    kv: str
    """Number format of keys and values."""
    load: Load | ServiceLoad
    weight_bytes: float
    """Bytes of a replica's weights, on all its devices together."""
    weight_width: float
    """Bytes per number of the blocks' matrices, scales included."""
    kv_width: float
    """Bytes per number of the cache, scales included."""
    ridge: float | None
    """FLOPs per byte below which the device is bound by bytes, by its datasheet; None on this machine."""
    prefill_flops: float
    """FLOPs of one prompt."""
    prefill_bytes: float
    """Weights that the prompt reads and the cache that it writes, of all ranks of a replica together."""
    usd_per_hour: float | None
    """Price of one device."""
    degrees: tuple[ServiceDegree, ...]
    notes: tuple[str, ...] = ()
    draft: DraftPlan | None = None

    @property
    def prefill_intensity(self) -> float:
        """FLOPs per byte of computing a prompt alone."""
        return self.prefill_flops / self.prefill_bytes

    def as_values(self) -> dict[str, Any]:
        """The plan for programs: bytes, FLOPs, seconds and dollars."""
        load, cluster = self.load, self.cluster
        return {
            "device": "this machine" if cluster is None else cluster.device.name,
            "devices": 1 if cluster is None else cluster.n_devices,
            **{name: getattr(self, name) for name in ("server", "weights", "kv")},
            **{name: getattr(load, name) for name in ("concurrency", "input_tokens", "output_tokens")},
            "requests_per_client": self.requests_per_client,
            "parameters": self.work.parameters,
            **{name: getattr(self, name) for name in ("weight_bytes", "ridge", "prefill_flops", "prefill_bytes")},
            **{name: getattr(self, name) for name in ("prefill_intensity", "usd_per_hour")},
            "degrees": [degree.as_values() for degree in self.degrees],
            "notes": list(self.notes),
            "draft": self.draft and {**dataclasses.asdict(self.draft), "improvement": self.draft.improvement},
        }

    @property
    def fitting(self) -> list[ServiceDegree]:
        """The degrees that serve the load, most tokens per second first."""
        fitting = [degree for degree in self.degrees if degree.tokens_per_second is not None]
        return sorted(fitting, key=lambda degree: -(degree.tokens_per_second or 0))

    @property
    def best(self) -> ServiceDegree | None:
        """The degree of most tokens per second; None where nothing fits."""
        return next(iter(self.fitting), None)

    @property
    def requests_per_client(self) -> float | None:
        """The number of requests that each client sends; None is the steady state, or a load without clients."""
        load = self.load
        if isinstance(load, ServiceLoad):
            return None if load.concurrency is None else load.requests / load.concurrency
        return None if load.concurrency is None or math.isinf(load.requests_per_client) else load.requests_per_client

    @property
    def requests(self) -> str:
        load = self.load
        sizes = f"requests of {load.input_tokens:g} + {load.output_tokens:g} tokens"
        if load.rate is not None:
            return f"{load.rate:g} {sizes} per second"
        return f"{load.concurrency:g} concurrent {sizes}"

    def summary(self) -> Iterator[Line]:
        yield "Service", self.requests
        best = self.best
        if best is None or best.times is None:
            yield "fits", "no: " + "; ".join(degree.reason or "" for degree in self.degrees)
            return
        times, interval = best.times, best.interval
        yield "best", f"tensor {best.tensor}, {best.replicas} replicas: {best.tokens_per_second:,.0f} tokens/s"
        for name, seconds, factor in (
            ("TTFT", times.time_to_first_token, interval and interval.ttft),
            ("TPOT", times.time_per_output_token, interval and interval.tpot),
        ):
            yield name, format_seconds(seconds) + (f", within a factor of {factor:.2f}" if factor else "")
        yield "weights", f"{format_bytes(round(best.weight_bytes))} per device"
        if self.ridge is not None:
            yield "ridge", f"{self.ridge:.0f} FLOPs per byte"
