"""Plan a service: what it takes to serve a model under a load, for each degree of tensor parallelism of the devices.

How far off its times may be, in nine cases of ten, is `interval_of`'s.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from napkin.accounting.quantities import Line, Summary
from napkin.errors import NapkinError
from napkin.hardware.cluster import Cluster, find_cluster
from napkin.hardware.service_efficiency import FITTED, efficiency_of_server, generation_spread
from napkin.model.config import ModelConfig
from napkin.planning.services.seconds import (
    KV_BYTES,
    WEIGHT_BYTES,
    KVFormat,
    Load,
    Replica,
    ServiceTimes,
    WeightFormat,
    service_times,
    sixteen_bits,
)
from napkin.planning.services.work import ServiceWork, count_work
from napkin.units import format_bytes, format_seconds

# On the generations and with the formats that a server's constants were fitted to: what held nine in ten of those
# measurements. Elsewhere each constant may differ as generations do: the time moves by its sensitivity to each, times
# their spread, all independent (propagation of uncertainty, first order).

NINE_IN_TEN = 1.645
"""Standard deviations on either side that hold nine in ten of a normal distribution."""
_STEP = 0.01


@dataclass(frozen=True)
class ServiceInterval:
    """Factors, up or down, that nine in ten measurements are expected within."""

    tpot: float
    ttft: float
    measured: bool
    """Whether such a generation and format was measured."""


def interval_of(replica: Replica, load: Load) -> ServiceInterval:
    """The factors of one replica under a load."""
    server = replica.server
    known = replica.weights in server.formats
    if known and replica.device.compute_capability in server.compute_capabilities:
        return ServiceInterval(server.tpot_factor, server.ttft_factor, measured=True)
    tpot, ttft = 0.0, 0.0
    at = _logs(replica, load)
    for name in FITTED:
        spread = generation_spread()[name]
        if spread:
            moved = dataclasses.replace(server, **{name: getattr(server, name) * math.exp(_STEP)})
            there = _logs(dataclasses.replace(replica, server=moved), load)
            tpot += ((there[0] - at[0]) / _STEP * spread) ** 2
            ttft += ((there[1] - at[1]) / _STEP * spread) ** 2
    return ServiceInterval(
        math.exp(math.hypot(math.log(server.tpot_factor), NINE_IN_TEN * math.sqrt(tpot))),
        math.exp(math.hypot(math.log(server.ttft_factor), NINE_IN_TEN * math.sqrt(ttft))),
        measured=False,
    )


def _logs(replica: Replica, load: Load) -> tuple[float, float]:
    times = service_times(replica, load)
    return math.log(times.time_per_output_token), math.log(times.time_to_first_token)


SERVER = "vllm"
"""Whose constants are taken if no server is named: that of most measurements across formats, after TensorRT-LLM."""
_MOST = 10**9
"""More requests, or tokens, than any service has."""


@dataclass(frozen=True)
class ServiceDegree:
    """The devices as replicas of so many ranks of tensor each. Bytes are of one device, times are of a request."""

    tensor: int
    replicas: int
    weight_bytes: float
    kv_pool_bytes: float
    """What is left for the cache; below 0 where the weights do not fit."""
    kv_bytes_per_sequence: float
    """Of a sequence at its longest."""
    sequences: int
    """How many of those fit into a replica."""
    decode_flops: float
    """Of one decode step of a replica, all its ranks together."""
    decode_bytes: float
    """Bytes of weights and cache that each of its ranks reads in that step."""
    times: ServiceTimes | None
    """None where the service does not fit, or where the links are not known: `reason` says so."""
    interval: ServiceInterval | None
    tokens_per_second: float | None
    """Output tokens of all replicas."""
    usd_per_million_tokens: float | None
    """Of output tokens; None without a price."""
    tokens_per_second_interval: tuple[float, float] | None = None
    """If both times are as long, or as short, as their intervals say."""
    reason: str | None = None

    @property
    def decode_intensity(self) -> float:
        """FLOPs per byte of a decode step."""
        return self.decode_flops / (self.decode_bytes * self.tensor)


@dataclass(frozen=True, repr=False)
class ServicePlan(Summary):
    """What serving a model takes on some devices, by degree of tensor parallelism."""

    model: ModelConfig
    work: ServiceWork
    cluster: Cluster
    server: str
    weights: WeightFormat
    kv: KVFormat
    load: Load
    weight_bytes: float
    """Of a replica, all its devices together."""
    ridge: float
    """FLOPs per byte below which the device is bound by bytes, by its datasheet."""
    prefill_flops: float
    """Of one prompt."""
    prefill_bytes: float
    """Weights that the prompt reads and the cache that it writes, of all ranks of a replica together."""
    usd_per_hour: float | None
    """Of one device."""
    degrees: tuple[ServiceDegree, ...]
    notes: tuple[str, ...] = ()

    @property
    def prefill_intensity(self) -> float:
        """FLOPs per byte of a prompt computed alone."""
        return self.prefill_flops / self.prefill_bytes

    @property
    def fitting(self) -> list[ServiceDegree]:
        """The degrees that serve the load, most tokens per second first."""
        fitting = [degree for degree in self.degrees if degree.tokens_per_second is not None]
        return sorted(fitting, key=lambda degree: -(degree.tokens_per_second or 0))

    @property
    def best(self) -> ServiceDegree | None:
        """The degree of most tokens per second; None where nothing fits."""
        return next(iter(self.fitting), None)

    def summary(self) -> Iterator[Line]:
        """The plan in a few lines."""
        load = self.load
        yield "Service", f"{load.concurrency:g} requests of {load.input_tokens:g} + {load.output_tokens:g} tokens"
        best = self.best
        if best is None or best.times is None or best.interval is None:
            yield "fits", "no: " + "; ".join(degree.reason or "" for degree in self.degrees)
            return
        times, interval = best.times, best.interval
        yield "best", f"tensor {best.tensor}, {best.replicas} replicas: {best.tokens_per_second:,.0f} tokens/s"
        yield "TTFT", f"{format_seconds(times.time_to_first_token)}, within a factor of {interval.ttft:.2f}"
        yield "TPOT", f"{format_seconds(times.time_per_output_token)}, within a factor of {interval.tpot:.2f}"
        yield "weights", f"{format_bytes(round(best.weight_bytes))} per device"
        yield "ridge", f"{self.ridge:.0f} FLOPs per byte"


def plan_service(
    model: ModelConfig,
    on: str,
    *,
    concurrency: int,
    input_tokens: int,
    output_tokens: int,
    server: str = SERVER,
    weights: WeightFormat = "bf16",
    kv: KVFormat | None = None,
    tensor: int | None = None,
    usd_per_hour: float | None = None,
    requests_per_client: int | None = None,
) -> ServicePlan:
    """Plan a service under a constant number of concurrent requests, without allocating the model.

    Args:
        model: what is served; its FLOPs and bytes are counted from a prefill and a decode step, traced on fake tensors.
        on: devices of the catalogue, as in "8xH100".
        concurrency: requests in flight: as one ends, the next comes.
        input_tokens: of each prompt.
        output_tokens: that each request generates.
        server: whose constants are taken: "vllm", "trtllm" or "sglang".
        weights: the format of the blocks' matrices, "bf16", "fp8", "fp8_block" or "nvfp4"; embedding and head are in
            bf16.
        kv: the format of the cache; None is fp8 for weights that are narrower than bf16, else bf16.
        tensor: ranks of tensor of a replica; None compares all that divide the devices and the heads.
        usd_per_hour: price of one device; None is the catalogue's.
        requests_per_client: how many requests each client sends in a measurement that this is compared with; None is
            the steady state.

    Raises NapkinError for sizes below 1, unknown devices, formats or servers, and a format that the devices lack.
    """
    _refuse_impossible(concurrency=concurrency, input_tokens=input_tokens, output_tokens=output_tokens)
    if weights not in WEIGHT_BYTES:
        raise NapkinError(f"weights is {weights!r}: use one of {', '.join(get_args(WeightFormat))}")
    kv = kv or ("bf16" if weights == "bf16" else "fp8")
    if kv not in KV_BYTES:
        raise NapkinError(f"kv is {kv!r}: use one of {', '.join(get_args(KVFormat))}")
    cluster, constants = find_cluster(on), efficiency_of_server(server)
    price = cluster.device.price
    usd_per_hour = usd_per_hour if usd_per_hour is not None else price.usd_per_hour if price else None
    load = Load(concurrency, input_tokens, output_tokens, requests_per_client or math.inf)
    work = count_work(model)
    one = Replica(work, cluster.device, constants, 1, weights, kv)
    notes: list[str] = []
    if input_tokens + output_tokens > model.context_length:
        notes.append(
            f"{input_tokens + output_tokens:,} tokens are more than the model's context of {model.context_length:,}"
        )
    if weights == "bf16" and sixteen_bits(cluster.device) != "bf16":
        notes.append(f"{cluster.device.name} has no bf16: planned in fp16, of the same bytes")
    degrees = tuple(
        _degree(dataclasses.replace(one, tensor=ranks), load, cluster, usd_per_hour)
        for ranks in _tensor_degrees(model, cluster, tensor)
    )
    read = work.weights_read(input_tokens) * WEIGHT_BYTES[weights] + 2 * work.head_weights
    return ServicePlan(
        model=model,
        work=work,
        cluster=cluster,
        server=server,
        weights=weights,
        kv=kv,
        load=load,
        weight_bytes=one.weight_bytes,
        ridge=one.ridge,
        prefill_flops=work.prefill_flops(input_tokens),
        prefill_bytes=read + work.kept(input_tokens) * work.kv_numbers * KV_BYTES[kv],
        usd_per_hour=usd_per_hour,
        degrees=degrees,
        notes=tuple(notes),
    )


def _refuse_impossible(**sizes: int) -> None:
    for name, value in sizes.items():
        if not 1 <= value <= _MOST:
            raise NapkinError(f"{name} is {value:,}: use a number from 1 to {_MOST:,}")


def _tensor_degrees(model: ModelConfig, cluster: Cluster, tensor: int | None) -> list[int]:
    """Those that divide the devices and the heads and stay within a node."""
    most = min(cluster.n_devices, cluster.node.devices)
    possible = [ranks for ranks in range(1, most + 1) if cluster.n_devices % ranks == 0 and model.n_heads % ranks == 0]
    if tensor is None:
        return possible
    if tensor not in possible:
        raise NapkinError(
            f"tensor is {tensor}, which does not divide the {cluster.n_devices} devices and {model.n_heads} heads, "
            f"within a node: use one of {', '.join(map(str, possible))}"
        )
    return [tensor]


def _degree(replica: Replica, load: Load, cluster: Cluster, usd_per_hour: float | None) -> ServiceDegree:
    replicas = cluster.n_devices // replica.tensor
    # Where there are fewer requests than replicas, the others are idle.
    own = dataclasses.replace(load, concurrency=max(1.0, load.concurrency / replicas))
    longest = load.input_tokens + load.output_tokens
    context = load.input_tokens + load.output_tokens / 2
    sequences = replica.sequences(longest)
    times: ServiceTimes | None = None
    interval: ServiceInterval | None = None
    rate: float | None = None
    rates: tuple[float, float] | None = None
    reason = None
    try:
        times = service_times(replica, own)
        interval = interval_of(replica, own)
        rate = _tokens_per_second(load, times)
        slow, fast = (interval.ttft, interval.tpot), (1 / interval.ttft, 1 / interval.tpot)
        rates = (_tokens_per_second(load, times, *slow), _tokens_per_second(load, times, *fast))
    except NapkinError as error:
        reason = str(error)
    running = times.running if times else own.concurrency
    usd = 1e6 * cluster.n_devices * usd_per_hour / 3600 / rate if rate and usd_per_hour else None
    return ServiceDegree(
        tensor=replica.tensor,
        replicas=replicas,
        weight_bytes=replica.weight_bytes,
        kv_pool_bytes=replica.kv_pool_bytes,
        kv_bytes_per_sequence=replica.work.kept(longest) * replica.kv_token_bytes,
        sequences=sequences,
        decode_flops=replica.work.decode_flops(running, context),
        decode_bytes=replica.step_bytes(running, context),
        times=times,
        interval=interval,
        tokens_per_second=rate,
        usd_per_million_tokens=usd,
        tokens_per_second_interval=rates,
        reason=reason,
    )


def _tokens_per_second(load: Load, times: ServiceTimes, ttft: float = 1.0, tpot: float = 1.0) -> float:
    """Output tokens of all clients, each of which has one request in flight (Little's law); with factors of both
    times."""
    request = ttft * times.time_to_first_token + (load.output_tokens - 1) * tpot * times.time_per_output_token
    return load.concurrency * load.output_tokens / request
