"""Plan a service: what it takes to serve a model under a load, on a catalogue's devices or on this machine.

On devices there is a degree for each number of tensor ranks: the schedule of a server is simulated with the seconds of
its steps. How far off the mean times may be, in nine cases of ten, is `interval_of`'s. On this machine there is one
degree: steps of napkin's own engine are timed and its schedule is simulated.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch

from napkin.accounting.quantities import Line, Summary
from napkin.errors import NapkinError
from napkin.hardware.cluster import Cluster, find_cluster
from napkin.hardware.service_efficiency import FITTED, efficiency_of_server, generation_spread
from napkin.inference.paged_cache import bytes_per_token, state_bytes_per_sequence
from napkin.inference.service_load import Served, ServiceLoad
from napkin.model.config import ModelConfig
from napkin.model.quantized import weight_bytes_of
from napkin.model.transformer import Transformer
from napkin.planning.services.draft_plan import Drafting, DraftPlan, config_of, draft_on_devices, refuse_draft
from napkin.planning.services.replica import (
    KV_BYTES,
    WEIGHT_BYTES,
    DraftWork,
    KVFormat,
    Replica,
    ServiceTimes,
    ServiceWork,
    WeightFormat,
    count_work,
    sixteen_bits,
    timeline_of,
    times_of,
    tokens_per_second,
)
from napkin.planning.services.server_schedule import Load, Timeline
from napkin.planning.services.this_machine import Simulation, probe_steps, simulate_engine, speculating_steps
from napkin.units import format_bytes, format_seconds

# On the devices and with the formats that a server's constants were fitted to: what held nine in ten of those
# measurements. Elsewhere each constant may differ as generations do: the time moves by its sensitivity to each, times
# their spread, all independent (propagation of uncertainty, first order).

NINE_IN_TEN = 1.645
"""Standard deviations on either side that hold nine in ten of a normal distribution."""
FIRST_TOKEN_SPREAD = 1.28
"""Factor with which the intervals of the time to first token hold nine in ten rows of a system whose rows no constant
was fitted to; those of the time per output token hold as many as they are (0.95). `benchmarks/published_serving.py`
prints both."""
_STEP = 0.01


@dataclass(frozen=True)
class ServiceInterval:
    """Factors, up or down, that nine in ten measurements are expected within."""

    tpot: float
    ttft: float
    measured: bool
    """True if such a device was measured with weights in this format, and without experts."""


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


SERVER = "vllm"
"""Whose constants are taken if no server is named: that of most measurements across formats, after TensorRT-LLM."""
REQUESTS_PER_CLIENT = 4
"""Requests that are simulated per client by default."""
REQUESTS_OF_RATE = 1000
"""Requests of a load that comes by `rate`, unless `requests` are given."""
PREFILL_CHUNK = 512
_BLOCK = 16
"""Tokens per block of the engine, as it is served."""
_MOST = 10**9
"""More requests, or tokens, than any service has."""


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
        found = dataclasses.asdict(dataclasses.replace(self, simulation=None))
        del found["simulation"]
        found["decode_intensity"] = self.decode_intensity
        if (seen := self.simulation) is not None:
            percents = (50, 90, 95, 99)
            found["time_to_first_token"] = {percent: seen.first_token(percent) for percent in percents}
            found["time_per_output_token"] = {percent: seen.per_token(percent) for percent in percents}
        return found


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


def plan_service(
    model: ModelConfig | Transformer,
    on: str | None = None,
    *,
    concurrency: int | None,
    input_tokens: int,
    output_tokens: int,
    server: str | None = None,
    weights: WeightFormat = "bf16",
    kv: KVFormat | Literal["int8"] | None = None,
    tensor: int | None = None,
    usd_per_hour: float | None = None,
    requests_per_client: int | None = None,
    requests: int | None = None,
    rate: float | None = None,
    shortest: float = 1.0,
    seed: int = 0,
    cache_bytes: int | None = None,
    max_running: int = 16,
    draft: ModelConfig | Transformer | None = None,
    acceptance: float | None = None,
    proposed: int = 4,
    progress: Callable[[str], None] = lambda doing: None,
) -> ServicePlan:
    """Plan a service under a load, without allocating the model; on this machine, steps of the engine are timed.

    `on` names accelerators, such as "8xH100"; None is napkin's own engine on this machine, where a model itself is
    timed, and of a config one with random weights in bf16. `concurrency` requests are in flight: as one ends, the next
    comes. Each client sends `requests_per_client`, by default so many that the state is steady. Without `concurrency`
    requests come at random moments, `rate` per second, drawn with `seed`, `requests` in all.

    On accelerators, `server` is whose constants are taken, "vllm" by default, "trtllm" or "sglang". `weights` is the
    format of the blocks' matrices; embedding and head are in bf16. `kv` is that of the cache, by default fp8 for
    narrower weights. `tensor` are the ranks of a replica; None compares all that divide the devices and the heads.
    `usd_per_hour` is of one device, by default the catalogue's. Lengths of requests are drawn evenly between `shortest`
    times those stated and those stated: requests of one length, whose first come together, stay together.

    On this machine `kv` may be "int8", clients send 4 requests by default, or `requests` are sent in all. `cache_bytes`
    are the memory of the cache, by default for what is running at its longest, of at most `max_running` sequences.

    A `draft` proposes `proposed` tokens for each pass of the model, each of which is accepted with the chance
    `acceptance`; its weights and its cache take their part of the memory, and a token takes its share of a pass. On
    devices it is in bf16.

    Raises NapkinError for sizes below 1, unknown devices, formats or servers, a format that the devices lack, and what
    this machine has no memory for.
    """
    config = config_of(model)
    for name, value in (
        ("concurrency", concurrency),
        ("input_tokens", input_tokens),
        ("output_tokens", output_tokens),
        ("requests_per_client", requests_per_client),
        ("requests", requests),
    ):
        if value is not None and not 1 <= value <= _MOST:
            raise NapkinError(f"{name} is {value:,}: use a number from 1 to {_MOST:,}")
    if usd_per_hour is not None and not 0 < usd_per_hour < math.inf:
        raise NapkinError(f"usd_per_hour is {usd_per_hour}: use a number above 0")
    refuse_draft(config, draft, acceptance, proposed)
    if on is None:
        for name, value, possible in (
            ("server", server, ("napkin",)),
            ("weights", weights, ("bf16",)),
            ("kv", kv, ("bf16", "int8")),
            ("tensor", tensor, (1,)),
            ("shortest", shortest, (1.0,)),
        ):
            if value is not None and value not in possible:
                known = " or ".join(map(str, possible))
                raise NapkinError(
                    f"{name} is {value}, which napkin's own engine does not have: use {known}, or name devices with "
                    "--on"
                )
        clients = concurrency or 1
        load = ServiceLoad(
            requests or clients * (requests_per_client or REQUESTS_PER_CLIENT),
            input_tokens,
            output_tokens,
            concurrency=concurrency,
            rate=rate,
            seed=seed,
        )
        drafting = None if draft is None else Drafting(draft, acceptance or 0.0, proposed)
        return _plan_here(model, load, kv == "int8", cache_bytes, max_running, usd_per_hour, drafting, progress)
    if cache_bytes is not None:
        raise NapkinError(f"cache_bytes is {cache_bytes}, which is planned on this machine alone: leave it out, or on")
    load = Load(
        concurrency,
        input_tokens,
        output_tokens,
        requests_per_client or math.inf,
        shortest=shortest,
        rate=rate,
        requests=requests or REQUESTS_OF_RATE,
        seed=seed,
    )
    drafting = None
    if draft is not None:
        drafting = DraftWork(count_work(config_of(draft)), acceptance or 0.0, proposed)
    cluster = find_cluster(on)
    return _plan_on_devices(config, cluster, load, server or SERVER, weights, kv, tensor, usd_per_hour, drafting)


def _plan_here(
    model: ModelConfig | Transformer,
    load: ServiceLoad,
    int8: bool,
    cache_bytes: int | None,
    max_running: int,
    usd_per_hour: float | None,
    drafting: Drafting | None,
    progress: Callable[[str], None],
) -> ServicePlan:
    config, given = (model.config, model) if isinstance(model, Transformer) else (model, None)
    size, context = load.input_tokens + load.output_tokens, load.input_tokens + load.output_tokens / 2
    if size > config.context_length:
        raise NapkinError(
            f"{load.input_tokens:,} + {load.output_tokens:,} tokens are more than the model's context of "
            f"{config.context_length:,}: use smaller input_tokens and output_tokens"
        )
    kv = "int8" if int8 else "auto"
    dtype = torch.bfloat16 if given is None else given.dtype
    name = str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    per_token, state_bytes = bytes_per_token(config, dtype, kv), state_bytes_per_sequence(config, dtype)
    of_draft = draft_weights = 0
    if drafting is not None:
        of_draft, draft_weights = drafting.bytes_per_token(dtype, kv), drafting.weight_bytes(dtype)
    # The engine divides the memory of the cache between both: a block has its tokens' keys and values of each.
    model_token, per_token = per_token, per_token + of_draft
    at_once = min(max_running, load.requests, load.concurrency or load.requests)
    # The engine has a slot of states for each sequence that may run.
    of_states = max_running * state_bytes if config.has_states else 0
    if cache_bytes is None:
        cache_bytes = at_once * (size + _BLOCK) * per_token + of_states
    if of_states > cache_bytes:
        raise NapkinError(
            f"the states of max_running {max_running} sequences take {of_states:,} bytes: lower it, or give cache_bytes"
        )
    of_sequence = -(-size // _BLOCK)
    n_blocks = (cache_bytes - of_states) // (_BLOCK * per_token) if per_token else max_running * of_sequence
    fits = n_blocks // of_sequence
    if fits < 1:
        raise NapkinError(
            f"a sequence of {size:,} tokens takes {format_bytes(of_sequence * _BLOCK * per_token)}, cache_bytes is "
            f"{format_bytes(cache_bytes)}: give more, or use fewer tokens"
        )
    work = count_work(config)
    weight_bytes = work.parameters * dtype.itemsize
    if given is not None:
        weight_bytes = weight_bytes_of(given)
    weight_bytes += draft_weights
    needed, free = weight_bytes + cache_bytes, psutil.virtual_memory().available
    if given is None and needed > free:
        raise NapkinError(
            f"weights and KV cache take {format_bytes(needed)}, this machine has {format_bytes(free)} free: use a "
            "smaller model or fewer requests, or name accelerators with --on"
        )
    running = min(at_once, fits)
    drafted = None
    how: dict[str, Any] = {"kv": kv, "progress": progress}
    steps = probe_steps(config, load, running, PREFILL_CHUNK, dtype, model=given, **how)
    if drafting is not None:
        plain, n_new = steps, drafting.proposed + 1
        tested = probe_steps(config, load, running, PREFILL_CHUNK, dtype, model=given, n_new=n_new, **how)
        proposing = drafting.probe(load, running, PREFILL_CHUNK, dtype, **how)
        steps = speculating_steps(tested, proposing, drafting.proposed, drafting.tokens_per_pass)
        drafted = DraftPlan(
            drafting.parameters,
            draft_weights,
            size * of_draft,
            drafting.acceptance,
            drafting.proposed,
            drafting.tokens_per_pass,
            draft_seconds=n_new * proposing.decode_seconds(running, context),
            pass_seconds=tested.decode_seconds(running, context),
            plain_seconds=plain.decode_seconds(running, context),
        )
    found = simulate_engine(load, steps, max_running, PREFILL_CHUNK, n_blocks=n_blocks, block_size=_BLOCK)

    def read(sequences: float, tokens: float, kept: float) -> float:
        weights = work.weights_read(tokens) + work.head_weights
        of_model = weights * (weight_bytes - draft_weights) / work.parameters
        return of_model + sequences * (kept * model_token + 2 * state_bytes)

    times = ServiceTimes(
        statistics.mean(each.time_to_first_token for each in found.served),
        statistics.mean(each.time_per_output_token for each in found.served),
        running=running,
        decode_step=steps.decode_seconds(running, context),
        waiting=found.waiting,
        busy=found.busy,
    )
    degree = ServiceDegree(
        tensor=1,
        replicas=1,
        weight_bytes=weight_bytes,
        kv_pool_bytes=cache_bytes,
        kv_bytes_per_sequence=size * per_token + state_bytes,
        sequences=fits,
        decode_flops=work.decode_flops(running, context),
        decode_bytes=read(running, running, context),
        times=times,
        interval=None,
        tokens_per_second=found.tokens_per_second,
        usd_per_million_tokens=1e6 * usd_per_hour / 3600 / found.tokens_per_second if usd_per_hour else None,
        simulation=found,
    )
    return ServicePlan(
        model=config,
        work=work,
        cluster=None,
        server="napkin",
        weights=name,
        kv="int8" if int8 else name,
        load=load,
        weight_bytes=weight_bytes - draft_weights,
        weight_width=dtype.itemsize,
        kv_width=model_token / config.cached_numbers if model_token else dtype.itemsize,
        ridge=None,
        prefill_flops=work.prefill_flops(load.input_tokens),
        prefill_bytes=read(1, load.input_tokens, load.input_tokens),
        usd_per_hour=usd_per_hour,
        degrees=(degree,),
        draft=drafted,
    )


def _plan_on_devices(
    model: ModelConfig,
    cluster: Cluster,
    load: Load,
    server: str,
    weights: WeightFormat,
    kv: KVFormat | Literal["int8"] | None,
    tensor: int | None,
    usd_per_hour: float | None,
    draft: DraftWork | None,
) -> ServicePlan:
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
    most = min(cluster.n_devices, cluster.node.devices)
    if model.has_states:
        if tensor not in (None, 1):
            raise NapkinError(f"tensor is {tensor}: the state of a layer is not divided, use tensor 1")
        most = 1
        notes.append("a server's constants were fitted to attention in all layers: those of layers with a state differ")
    possible = [ranks for ranks in range(1, most + 1) if cluster.n_devices % ranks == 0 and model.n_heads % ranks == 0]
    if tensor is not None and tensor not in possible:
        raise NapkinError(
            f"tensor is {tensor}, which does not divide the {cluster.n_devices} devices and {model.n_heads} heads, "
            f"within a node: use one of {', '.join(map(str, possible))}"
        )
    degrees = tuple(
        _degree(dataclasses.replace(one, tensor=ranks), load, cluster, usd_per_hour)
        for ranks in (possible if tensor is None else [tensor])
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
    found, counts = timeline.priced(replica.step_seconds), load.weights(timeline.wave) > 0
    around = replica.server.request_seconds
    lines = zip(found.first_token[counts] + around, found.per_token[counts], timeline.outputs[counts], strict=True)
    served = tuple(Served(float(first), float(token), int(outputs)) for first, token, outputs in lines)
    return Simulation(served, found.seconds, float(found.waiting[counts].mean()), found.in_prompts / found.seconds)
