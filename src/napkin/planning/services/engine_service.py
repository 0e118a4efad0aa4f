"""Plan a service on this machine: steps of napkin's own engine are timed, and its schedule is simulated with them."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from napkin.errors import NapkinError
from napkin.inference.paged_cache import KVFormat, bytes_per_token, state_bytes_per_sequence
from napkin.inference.service_load import ServiceLoad
from napkin.model.config import ModelConfig
from napkin.model.quantized import weight_bytes_of
from napkin.model.transformer import Transformer
from napkin.planning.services.draft_plan import Drafting, DraftPlan, config_of
from napkin.planning.services.replica import ServiceTimes, count_work
from napkin.planning.services.service_plan import ServiceDegree, ServicePlan
from napkin.planning.services.this_machine import StepSeconds, probe_steps, simulate_engine, speculating_steps
from napkin.units import format_bytes

PREFILL_CHUNK = 512
"""Tokens of a prompt that the engine computes at a time."""
_BLOCK = 16
"""Tokens per block of the engine, as it is served."""


def plan_engine_service(
    model: ModelConfig | Transformer,
    load: ServiceLoad,
    *,
    int8: bool,
    cache_bytes: int | None,
    max_running: int,
    usd_per_hour: float | None,
    drafting: Drafting | None,
    progress: Callable[[str], None],
) -> ServicePlan:
    """The plan of serving a load with this machine's engine, with keys and values in int8 or in the model's format.

    Of a config, a model with random weights in bf16 is timed. `cache_bytes` None is the memory for what is running at
    its longest, of at most `max_running` sequences. Raises NapkinError for what does not fit, into the model's context,
    the cache, or memory.
    """
    config, timed = config_of(model), model if isinstance(model, Transformer) else None
    size, context = load.input_tokens + load.output_tokens, load.input_tokens + load.output_tokens / 2
    if size > config.context_length:
        raise NapkinError(
            f"{load.input_tokens:,} + {load.output_tokens:,} tokens are more than the model's context of "
            f"{config.context_length:,}: use smaller input_tokens and output_tokens"
        )
    dtype = torch.bfloat16 if timed is None else timed.dtype
    cache = _engine_cache(config, dtype, "int8" if int8 else "auto", load, cache_bytes, max_running, drafting)
    work = count_work(config)
    model_weights = work.parameters * dtype.itemsize if timed is None else weight_bytes_of(timed)
    weight_bytes = model_weights + (0 if drafting is None else drafting.weight_bytes(dtype))
    needed, free = weight_bytes + cache.bytes, psutil.virtual_memory().available
    if timed is None and needed > free:
        raise NapkinError(
            f"weights and KV cache take {format_bytes(needed)}, this machine has {format_bytes(free)} free: use a "
            "smaller model or fewer requests, or name accelerators with --on"
        )
    steps, draft = _timed_steps(model, dtype, load, cache, drafting, progress)
    simulation = simulate_engine(load, steps, max_running, PREFILL_CHUNK, n_blocks=cache.n_blocks, block_size=_BLOCK)
    times = ServiceTimes(
        statistics.mean(each.time_to_first_token for each in simulation.served),
        statistics.mean(each.time_per_output_token for each in simulation.served),
        running=cache.running,
        decode_step=steps.decode_seconds(cache.running, context),
        waiting=simulation.waiting,
        busy=simulation.busy,
    )

    def bytes_read(sequences: float, tokens: float, kept: float) -> float:
        weights = (work.weights_read(tokens) + work.head_weights) * model_weights / work.parameters
        return weights + sequences * (kept * cache.model_token_bytes + 2 * cache.state_bytes)

    degree = ServiceDegree(
        tensor=1,
        replicas=1,
        weight_bytes=weight_bytes,
        kv_pool_bytes=cache.bytes,
        kv_bytes_per_sequence=size * cache.token_bytes + cache.state_bytes,
        sequences=cache.sequences,
        decode_flops=work.decode_flops(cache.running, context),
        decode_bytes=bytes_read(cache.running, cache.running, context),
        times=times,
        interval=None,
        tokens_per_second=simulation.tokens_per_second,
        usd_per_million_tokens=1e6 * usd_per_hour / 3600 / simulation.tokens_per_second if usd_per_hour else None,
        simulation=simulation,
    )
    name = str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    return ServicePlan(
        model=config,
        work=work,
        cluster=None,
        server="napkin",
        weights=name,
        kv="int8" if int8 else name,
        load=load,
        weight_bytes=model_weights,
        weight_width=dtype.itemsize,
        kv_width=cache.model_token_bytes / config.cached_numbers if cache.model_token_bytes else dtype.itemsize,
        ridge=None,
        prefill_flops=work.prefill_flops(load.input_tokens),
        prefill_bytes=bytes_read(1, load.input_tokens, load.input_tokens),
        usd_per_hour=usd_per_hour,
        degrees=(degree,),
        draft=draft,
    )


@dataclass(frozen=True)
class _EngineCache:
    """The memory of the engine's keys, values and states."""

    kv: KVFormat
    bytes: int
    n_blocks: int
    model_token_bytes: int
    """Bytes per token of the model's keys and values."""
    token_bytes: int
    """Bytes per token of the keys and values of the model and of a draft."""
    state_bytes: int
    """Bytes of a sequence's states; 0 without layers that have one."""
    sequences: int
    """Number of sequences of the load that fit at their longest."""
    running: int
    """Number of sequences that are computed together."""


def _engine_cache(
    config: ModelConfig,
    dtype: torch.dtype,
    kv: KVFormat,
    load: ServiceLoad,
    cache_bytes: int | None,
    max_running: int,
    drafting: Drafting | None,
) -> _EngineCache:
    """Divide the memory of the cache into blocks. Raises NapkinError if a sequence of the load does not fit."""
    size = load.input_tokens + load.output_tokens
    model_token_bytes, state_bytes = bytes_per_token(config, dtype, kv), state_bytes_per_sequence(config, dtype)
    # A block has its tokens' keys and values of the draft too.
    token_bytes = model_token_bytes + (0 if drafting is None else drafting.bytes_per_token(dtype, kv))
    at_once = min(max_running, load.requests, load.concurrency or load.requests)
    # The engine has a slot of states for each sequence that may run.
    slots = max_running * state_bytes if config.has_states else 0
    if cache_bytes is None:
        cache_bytes = at_once * (size + _BLOCK) * token_bytes + slots
    if slots > cache_bytes:
        raise NapkinError(
            f"the states of max_running {max_running} sequences take {slots:,} bytes: lower it, or give cache_bytes"
        )
    blocks_of_sequence = -(-size // _BLOCK)
    n_blocks = max_running * blocks_of_sequence
    if token_bytes:
        n_blocks = (cache_bytes - slots) // (_BLOCK * token_bytes)
    sequences = n_blocks // blocks_of_sequence
    if sequences < 1:
        raise NapkinError(
            f"a sequence of {size:,} tokens takes {format_bytes(blocks_of_sequence * _BLOCK * token_bytes)}, "
            f"cache_bytes is {format_bytes(cache_bytes)}: give more, or use fewer tokens"
        )
    running = min(at_once, sequences)
    return _EngineCache(kv, cache_bytes, n_blocks, model_token_bytes, token_bytes, state_bytes, sequences, running)


def _timed_steps(
    model: ModelConfig | Transformer,
    dtype: torch.dtype,
    load: ServiceLoad,
    cache: _EngineCache,
    drafting: Drafting | None,
    progress: Callable[[str], None],
) -> tuple[StepSeconds, DraftPlan | None]:
    """Seconds of the engine's steps; with a draft, of the share of a pass that a token takes, and the draft's gain."""
    given, running = model if isinstance(model, Transformer) else None, cache.running

    def probe(n_new: int) -> StepSeconds:
        return probe_steps(
            config_of(model),
            load,
            running,
            PREFILL_CHUNK,
            dtype,
            kv=cache.kv,
            model=given,
            n_new=n_new,
            progress=progress,
        )

    plain = probe(n_new=1)
    if drafting is None:
        return plain, None
    n_new, context = drafting.proposed + 1, load.input_tokens + load.output_tokens / 2
    tested = probe(n_new)
    proposing = drafting.probe(load, running, PREFILL_CHUNK, dtype, kv=cache.kv, progress=progress)
    draft = DraftPlan(
        drafting.parameters,
        drafting.weight_bytes(dtype),
        (load.input_tokens + load.output_tokens) * (cache.token_bytes - cache.model_token_bytes),
        drafting.acceptance,
        drafting.proposed,
        drafting.tokens_per_pass,
        draft_seconds=n_new * proposing.decode_seconds(running, context),
        pass_seconds=tested.decode_seconds(running, context),
        plain_seconds=plain.decode_seconds(running, context),
    )
    return speculating_steps(tested, proposing, drafting.proposed, drafting.tokens_per_pass), draft
