"""Plan a service on a catalogue's devices: a degree for each number of tensor ranks.

The schedule of a server is simulated with the seconds of its steps. How far off the mean times may be, in nine cases of
ten, is `interval_of`'s: on the devices and with the formats that a server's constants were fitted to, what held nine in
ten of those measurements. Elsewhere each constant may differ as generations do: the time moves by its sensitivity to
each, times their spread, all independent (propagation of uncertainty, first order).
"""

import dataclasses
import math
from typing import Literal

from napkin.errors import NapkinError
from napkin.hardware.cluster import Cluster
from napkin.hardware.service_efficiency import FITTED, efficiency_of_server, generation_spread
from napkin.inference.service_load import Served
from napkin.model.config import ModelConfig
from napkin.planning.services.draft_plan import draft_on_devices
from napkin.planning.services.replica import (
    KV_BYTES,
    WEIGHT_BYTES,
    DraftWork,
    KVFormat,
    Replica,
    WeightFormat,
    count_work,
    sixteen_bits,
    timeline_of,
    times_of,
    tokens_per_second,
)
from napkin.planning.services.server_schedule import Load, Timeline
from napkin.planning.services.service_plan import ServiceDegree, ServiceInterval, ServicePlan
from napkin.planning.services.this_machine import Simulation

NINE_IN_TEN = 1.645
"""Standard deviations on either side that hold nine in ten of a normal distribution."""
FIRST_TOKEN_SPREAD = 1.28
"""Factor with which the intervals of the time to first token hold nine in ten rows of a system whose rows no constant
was fitted to; those of the time per output token hold as many as they are (0.95). `benchmarks/published_serving.py`
prints both."""
_STEP = 0.01


def plan_device_service(
    model: ModelConfig,
    cluster: Cluster,
    load: Load,
    *,
    server: str,
    weights: WeightFormat,
    kv: KVFormat | Literal["int8"] | None,
    tensor: int | None,
    usd_per_hour: float | None,
    draft: DraftWork | None,
) -> ServicePlan:
    """The plan of serving a load on a cluster, for each number of tensor ranks, or for `tensor` of them.

    `kv` None is fp8 for weights narrower than bf16, `usd_per_hour` None the catalogue's price. Raises NapkinError for a
    format that the server or the device lacks, and for a `tensor` that does not divide the devices and the heads.
    """
    if weights not in WEIGHT_BYTES:
        raise NapkinError(f"weights is {weights!r}: use one of {', '.join(WEIGHT_BYTES)}")
    kv = kv or ("bf16" if weights == "bf16" else "fp8")
    if kv not in KV_BYTES:
        raise NapkinError(f"kv is {kv}, with which {server} was not measured: use {' or '.join(KV_BYTES)}")
    constants, price = efficiency_of_server(server, cluster.device), cluster.device.price
    usd_per_hour = usd_per_hour if usd_per_hour is not None else price.usd_per_hour if price else None
    work = count_work(model)
    one = Replica(work, cluster.device, constants, 1, weights, kv, draft)
    tokens = load.input_tokens + load.output_tokens
    notes: list[str] = []
    if tokens > model.context_length:
        notes.append(f"{tokens:,} tokens are more than the model's context of {model.context_length:,}")
    if weights == "bf16" and sixteen_bits(cluster.device) != "bf16":
        notes.append(f"{cluster.device.name} has no bf16: planned in fp16, of the same bytes")
    if model.has_states:
        notes.append("a server's constants were fitted to attention in all layers: those of layers with a state differ")
    degrees = tuple(
        _degree(dataclasses.replace(one, tensor=ranks), load, cluster, usd_per_hour)
        for ranks in _ranks_of_replica(model, cluster, tensor)
    )
    drafted = None
    if draft is not None:
        serving = [each for each in degrees if each.tokens_per_second]
        best = max(serving, key=lambda each: each.tokens_per_second or 0) if serving else degrees[-1]
        running = best.times.running if best.times else load.concurrency or 1.0
        drafted = draft_on_devices(dataclasses.replace(one, tensor=best.tensor), running, load)
    read = work.weights_read(load.input_tokens) * WEIGHT_BYTES[weights] + 2 * work.head_weights
    return ServicePlan(
        model=model,
        work=work,
        cluster=cluster,
        server=server,
        weights=weights,
        kv=kv,
        load=load,
        weight_bytes=one.model_weight_bytes,
        weight_width=WEIGHT_BYTES[weights],
        kv_width=KV_BYTES[kv],
        ridge=one.ridge,
        prefill_flops=work.prefill_flops(load.input_tokens),
        prefill_bytes=read + work.kept(load.input_tokens) * work.kv_numbers * KV_BYTES[kv],
        usd_per_hour=usd_per_hour,
        degrees=degrees,
        notes=tuple(notes),
        draft=drafted,
    )


def _ranks_of_replica(model: ModelConfig, cluster: Cluster, tensor: int | None) -> list[int]:
    """The numbers of tensor ranks that divide the devices and the heads within a node, or the one that is asked for."""
    if model.has_states and tensor not in (None, 1):
        raise NapkinError(f"tensor is {tensor}: the state of a layer is not divided, use tensor 1")
    most = 1 if model.has_states else min(cluster.n_devices, cluster.node.devices)
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
    own = load
    if load.rate is not None:
        own = dataclasses.replace(load, rate=load.rate / replicas, requests=-(-load.requests // replicas))
    elif load.concurrency is not None:
        own = dataclasses.replace(load, concurrency=max(1.0, load.concurrency / replicas))
    longest, context = load.input_tokens + load.output_tokens, load.input_tokens + load.output_tokens / 2
    times = interval = rate = rates = reason = simulation = None
    try:
        timeline = timeline_of(replica, own)
        times = times_of(replica, own, timeline)
        simulation = _simulation_of(replica, own, timeline)
        if load.concurrency is None:
            # Near its limit an open load has a queue of any length: no interval of its times was ever calibrated.
            rate = replicas * simulation.tokens_per_second
        else:
            interval = interval_of(replica, own, timeline)
            rate = tokens_per_second(load, times)
            slow, fast = (interval.ttft, interval.tpot), (1 / interval.ttft, 1 / interval.tpot)
            rates = (tokens_per_second(load, times, *slow), tokens_per_second(load, times, *fast))
    except NapkinError as error:
        reason = str(error)
    running = times.running if times else own.concurrency or 1.0
    usd = 1e6 * cluster.n_devices * usd_per_hour / 3600 / rate if rate and usd_per_hour else None
    return ServiceDegree(
        tensor=replica.tensor,
        replicas=replicas,
        weight_bytes=replica.weight_bytes,
        kv_pool_bytes=replica.kv_pool_bytes,
        kv_bytes_per_sequence=replica.sequence_bytes(longest),
        sequences=replica.sequences(longest),
        decode_flops=replica.pass_flops(running, context),
        decode_bytes=replica.step_bytes(running, context),
        times=times,
        interval=interval,
        tokens_per_second=rate,
        usd_per_million_tokens=usd,
        tokens_per_second_interval=rates,
        reason=reason,
        simulation=simulation,
    )


def _simulation_of(replica: Replica, load: Load, timeline: Timeline) -> Simulation:
    """The latencies of each request, those of the start and the end left out where the state is steady."""
    priced, counts = timeline.priced(replica.step_seconds), load.weights(timeline.wave) > 0
    around = replica.server.request_seconds
    lines = zip(priced.first_token[counts] + around, priced.per_token[counts], timeline.outputs[counts], strict=True)
    served = tuple(Served(float(first), float(token), int(outputs)) for first, token, outputs in lines)
    return Simulation(served, priced.seconds, float(priced.waiting[counts].mean()), priced.in_prompts / priced.seconds)


def interval_of(replica: Replica, load: Load, timeline: Timeline) -> ServiceInterval:
    """Factors of the 90% intervals for one replica under a load, whose steps are `timeline`."""
    server = replica.server
    known = replica.weights in server.formats and not replica.work.n_experts
    if known and replica.device.name in server.devices:
        return ServiceInterval(server.tpot_factor, server.ttft_factor, measured=True)
    tpot, ttft = 0.0, 0.0
    at = times_of(replica, load, timeline)
    for name in FITTED:
        spread = generation_spread()[name]
        if spread:
            moved = dataclasses.replace(server, **{name: getattr(server, name) * math.exp(_STEP)})
            there = times_of(dataclasses.replace(replica, server=moved), load, timeline)
            if at.time_per_output_token:
                tpot += (math.log(there.time_per_output_token / at.time_per_output_token) / _STEP * spread) ** 2
            ttft += (math.log(there.time_to_first_token / at.time_to_first_token) / _STEP * spread) ** 2
    return ServiceInterval(
        math.exp(math.hypot(math.log(server.tpot_factor), NINE_IN_TEN * math.sqrt(tpot))),
        math.exp(FIRST_TOKEN_SPREAD * math.hypot(math.log(server.ttft_factor), NINE_IN_TEN * math.sqrt(ttft))),
        measured=False,
    )
