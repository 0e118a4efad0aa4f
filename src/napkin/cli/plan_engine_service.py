"""`napkin plan --serve` without --on: what napkin's own engine takes on this machine."""

from typing import TYPE_CHECKING, Any

from napkin.cli.progress import progress_line
from napkin.cli.terminal import print_json, print_table, say
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from napkin.inference.paged_cache import KVFormat
    from napkin.planning.services.engine_service import EngineService

MAX_RUNNING = 16
REQUESTS_PER_CLIENT = 4
"""That are simulated."""


def print_engine_service(
    model: ModelConfig,
    *,
    concurrency: int,
    input_tokens: int,
    output_tokens: int,
    kv: "KVFormat" = "auto",
    json: bool,
) -> None:
    """Time steps of the engine, simulate the load, and print what its requests see."""
    if input_tokens + output_tokens > model.context_length:
        raise NapkinError(
            f"{input_tokens} + {output_tokens} tokens are more than the model's context of {model.context_length}: use "
            "smaller --input-tokens and --output-tokens"
        )
    with progress_line("timing steps of the engine") as line:
        import torch

        from napkin.inference.paged_cache import bytes_per_token
        from napkin.inference.service_load import ServiceLoad
        from napkin.planning.services.engine_service import plan_engine_service

        load = ServiceLoad(REQUESTS_PER_CLIENT * concurrency, input_tokens, output_tokens, concurrency=concurrency)
        whole = min(MAX_RUNNING, concurrency) * (input_tokens + output_tokens + 16)
        plan = plan_engine_service(
            model,
            load,
            cache_bytes=whole * bytes_per_token(model, torch.bfloat16, kv),
            max_running=MAX_RUNNING,
            kv=kv,
            progress=line.retitle,
        )
    if json:
        print_json(engine_service_json(plan))
        return
    formats = "bf16, KV in int8" if kv == "int8" else "bf16"
    say(
        f"plan of napkin's own engine on this machine, {formats}: {concurrency} concurrent requests of {input_tokens} "
        f"+ {output_tokens} tokens, {plan.running} running at a time"
    )
    found = plan.expected
    decode = plan.steps.decode_seconds(plan.running, input_tokens + output_tokens / 2)
    print_table(
        (),
        [
            ("weights", format_bytes(plan.weight_bytes)),
            ("KV of a sequence", format_bytes(plan.kv_bytes_per_sequence)),
            ("KV cache", format_bytes(plan.cache_bytes)),
            (f"a step of {plan.running} sequences", format_seconds(decode)),
        ],
        align="lr",
    )
    print_table(
        ("", "median", "90%", "99%"),
        [
            ("time to first token", *(format_seconds(found.first_token(percent)) for percent in (50, 90, 99))),
            ("time per output token", *(format_seconds(found.per_token(percent)) for percent in (50, 90, 99))),
        ],
        align="lrrr",
    )
    say(f"{found.tokens_per_second:,.1f} tokens per second; steps were timed, their schedule simulated")


def engine_service_json(plan: "EngineService") -> dict[str, Any]:
    """The plan for programs: bytes and seconds."""
    found = plan.expected
    return {
        "device": "this machine",
        "concurrency": plan.load.concurrency,
        "input_tokens": plan.load.input_tokens,
        "output_tokens": plan.load.output_tokens,
        "running": plan.running,
        "weight_bytes": plan.weight_bytes,
        "kv_bytes_per_sequence": plan.kv_bytes_per_sequence,
        "cache_bytes": plan.cache_bytes,
        "time_to_first_token": {percent: found.first_token(percent) for percent in (50, 90, 95, 99)},
        "time_per_output_token": {percent: found.per_token(percent) for percent in (50, 90, 95, 99)},
        "tokens_per_second": found.tokens_per_second,
    }
