"""Plan a service: what it takes to serve a model under a load, on a catalogue's devices or on this machine."""

import math
from collections.abc import Callable
from typing import Any, Literal

from napkin.errors import NapkinError
from napkin.hardware.cluster import find_cluster
from napkin.inference.service_load import ServiceLoad
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.planning.services.device_service import plan_device_service
from napkin.planning.services.draft_plan import Drafting, config_of, refuse_draft
from napkin.planning.services.engine_service import plan_engine_service
from napkin.planning.services.replica import DraftWork, KVFormat, WeightFormat, count_work
from napkin.planning.services.server_schedule import Load
from napkin.planning.services.service_plan import ServicePlan

SERVER = "vllm"
"""Whose constants are taken if no server is named: that of most measurements across formats, after TensorRT-LLM."""
REQUESTS_PER_CLIENT = 4
"""Requests that are simulated per client by default."""
REQUESTS_OF_RATE = 1000
"""Requests of a load that comes by `rate`, unless `requests` are given."""
_MOST = 10**9
"""More requests, or tokens, than any service has."""


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
    _refuse_impossible(
        usd_per_hour,
        concurrency=concurrency,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        requests_per_client=requests_per_client,
        requests=requests,
    )
    refuse_draft(config, draft, acceptance, proposed)
    if on is None:
        _refuse_for_engine(server=server, weights=weights, kv=kv, tensor=tensor, shortest=shortest)
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
        return plan_engine_service(
            model,
            load,
            int8=kv == "int8",
            cache_bytes=cache_bytes,
            max_running=max_running,
            usd_per_hour=usd_per_hour,
            drafting=drafting,
            progress=progress,
        )
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
    return plan_device_service(
        config,
        find_cluster(on),
        load,
        server=server or SERVER,
        weights=weights,
        kv=kv,
        tensor=tensor,
        usd_per_hour=usd_per_hour,
        draft=drafting,
    )


def _refuse_impossible(usd_per_hour: float | None, **sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and not 1 <= size <= _MOST:
            raise NapkinError(f"{name} is {size:,}: use a number from 1 to {_MOST:,}")
    if usd_per_hour is not None and not 0 < usd_per_hour < math.inf:
        raise NapkinError(f"usd_per_hour is {usd_per_hour}: use a number above 0")


_OF_ENGINE: dict[str, tuple[Any, ...]] = {
    "server": ("napkin",),
    "weights": ("bf16",),
    "kv": ("bf16", "int8"),
    "tensor": (1,),
    "shortest": (1.0,),
}


def _refuse_for_engine(**chosen: Any) -> None:
    """Raise NapkinError for a value that napkin's own engine does not have."""
    for name, possible in _OF_ENGINE.items():
        if (value := chosen[name]) is not None and value not in possible:
            known = " or ".join(map(str, possible))
            raise NapkinError(
                f"{name} is {value}, which napkin's own engine does not have: use {known}, or name devices with --on"
            )
