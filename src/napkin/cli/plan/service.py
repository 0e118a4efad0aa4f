"""`napkin plan --serve ...`: what serving a model takes: of a catalogue's devices by degree of tensor parallelism, or,
without --on, of napkin's own engine on this machine."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from napkin.cli.common.options import JsonOption
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeOptions, RecipeSource, recipe_command
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.units import format_bytes, format_flops, format_seconds, format_three_digits

if TYPE_CHECKING:
    from napkin.inference.paged_cache import KVFormat
    from napkin.planning.services.service_plan import ServiceDegree, ServicePlan
    from napkin.planning.services.this_machine import EngineService


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
        from napkin.planning.services.this_machine import plan_engine_service

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


@dataclass(frozen=True)
class ServiceOptions(RecipeOptions, JsonOption):
    """Plan a service: memory, time to first token (TTFT), time per output token (TPOT), tokens per second and dollars
    under a constant number of concurrent requests, for each degree of tensor parallelism of the devices. Of the recipe
    only the model is read: napkin plan service --preset llama-3-8b --on 8xH100 --concurrency 64."""

    on: str | None = None
    """Accelerators: H100, 8xH100, 8xmydevice.toml; `napkin hardware` lists them. None is napkin's own engine on this
    machine, whose steps are timed."""
    concurrency: int = 64
    """Requests in flight: as one ends, the next comes."""
    input_tokens: int = 1024
    """Tokens of each prompt."""
    output_tokens: int = 256
    """Tokens that each request generates."""
    server: Literal["vllm", "trtllm", "sglang"] = "vllm"
    """The server whose measured constants are taken."""
    weights: Literal["bf16", "fp8", "fp8_block", "nvfp4"] = "bf16"
    """Format of the blocks' matrices; embedding and head are in bf16."""
    kv: Literal["auto", "bf16", "fp8", "int8"] = "auto"
    """Format of the KV cache; auto is fp8 for weights that are narrower than bf16. napkin's own engine has bf16 and
    int8, the other servers bf16 and fp8."""
    tensor: int | None = None
    """Devices that divide the matrices of a replica; None compares all degrees."""
    requests_per_client: int | None = None
    """How many requests each client sends, in a measurement that the plan is compared with: the first of all come at
    the same time. None is the steady state."""
    usd_per_hour: float | None = None
    """Price of one device; None is the catalogue's, if it has one."""


@recipe_command("plan service", ServiceOptions)
def main(options: ServiceOptions, _: RecipeSource) -> None:
    if options.usd_per_hour is not None and not 0 < options.usd_per_hour < math.inf:
        raise NapkinError(f"--usd-per-hour is {options.usd_per_hour}: use a number above 0")
    if options.requests_per_client is not None and options.requests_per_client < 1:
        raise NapkinError(f"--requests-per-client is {options.requests_per_client}: use a number above 0")
    if options.on is None:
        if options.concurrency < 1 or options.input_tokens < 1 or options.output_tokens < 1:
            raise NapkinError("--concurrency, --input-tokens and --output-tokens are 1 or more")
        if options.kv == "fp8":
            raise NapkinError("--kv is fp8, which napkin's own engine does not have: use bf16 or int8, or name --on")
        print_engine_service(
            options.recipe.model,
            concurrency=options.concurrency,
            input_tokens=options.input_tokens,
            output_tokens=options.output_tokens,
            kv="int8" if options.kv == "int8" else "auto",
            json=options.json,
        )
        return
    if options.kv == "int8":
        raise NapkinError(
            f"--kv is int8, with which {options.server} was not measured: use bf16 or fp8, or leave out --on"
        )
    with progress_line("counting prefill and decode"):
        from napkin.planning.services.service_plan import plan_service

        plan = plan_service(
            options.recipe.model,
            options.on,
            concurrency=options.concurrency,
            input_tokens=options.input_tokens,
            output_tokens=options.output_tokens,
            server=options.server,
            weights=options.weights,
            kv=None if options.kv == "auto" else options.kv,
            tensor=options.tensor,
            usd_per_hour=options.usd_per_hour,
            requests_per_client=options.requests_per_client,
        )
    if options.json:
        print_json(service_json(plan))
    else:
        print_service(plan)
    if plan.best is None:
        raise NapkinError(f"the service does not fit: {plan.degrees[-1].reason}")
    for note in plan.notes:
        notify(note)


def print_service(plan: "ServicePlan") -> None:
    """Print what was counted, beside its rule, then a row per degree."""
    load, device = plan.load, plan.cluster.device
    say(
        f"plan of a service on {plan.cluster.n_devices} × {device.name}: {load.concurrency:g} concurrent requests of "
        f"{load.input_tokens:g} + {load.output_tokens:g} tokens, {plan.server}, weights in {plan.weights}, cache in "
        f"{plan.kv}"
    )
    print_table(("", "rule", "count", ""), list(_counted(plan)), align="lrrl")
    say()
    headings = ["tensor", "replicas", "weights", "left for KV", "sequences fit", "decode step reads", "FLOP/B"]
    headings += ["TTFT", "nine in ten", "TPOT", "nine in ten", "tokens/s", "$/M tokens"]
    print_table(headings, [_cells(degree) for degree in plan.degrees])
    say(
        "bytes are of one device, sequences of one replica, tokens (those generated) and dollars of all devices",
        style="dim",
    )
    for line in _remarks(plan):
        say(line)


def _counted(plan: "ServicePlan") -> Iterator[tuple[str, str, str, str]]:
    from napkin.accounting.rules import forward_flops_rule, kv_cache_bytes_rule
    from napkin.planning.services.seconds import KV_BYTES, WEIGHT_BYTES

    load, work, model = plan.load, plan.work, plan.model
    rule = format_flops(forward_flops_rule(work.parameters, load.input_tokens))
    yield "prefill of a prompt", rule, format_flops(plan.prefill_flops), "2·N·T"
    rule = format_flops(forward_flops_rule(work.parameters, 1))
    context = load.input_tokens + load.output_tokens / 2
    yield "decode, a token", rule, format_flops(work.decode_flops(1, context)), f"2·N; {context:g} tokens in the cache"
    rule = format_bytes(work.parameters * WEIGHT_BYTES[plan.weights])
    yield "weights", rule, format_bytes(plan.weight_bytes), "N·bytes"
    longest = load.input_tokens + load.output_tokens
    numbers = kv_cache_bytes_rule(
        n_layers=model.n_layers,
        n_kv_heads=model.resolved_n_kv_heads,
        head_dim=model.resolved_head_dim,
        context_length=round(longest),
        bytes_per_number=1,
    )
    counted = work.kv_numbers * work.kept(longest) * KV_BYTES[plan.kv]
    yield "KV of a sequence", format_bytes(numbers * KV_BYTES[plan.kv]), format_bytes(counted), "2·L·kv·c·bytes"
    bound = "arithmetic" if plan.prefill_intensity > plan.ridge else "bytes"
    yield "prefill, FLOPs per byte", "", format_three_digits(plan.prefill_intensity), f"bound by {bound}"
    yield "ridge, FLOPs per byte", "", format_three_digits(plan.ridge), "of the device, by its datasheet"


def _cells(degree: "ServiceDegree") -> list[str]:
    memory = [format_bytes(degree.weight_bytes), format_bytes(max(0.0, degree.kv_pool_bytes))]
    sizes = [str(degree.tensor), str(degree.replicas), *memory, f"{degree.sequences:,}"]
    if degree.times is None or degree.interval is None or degree.tokens_per_second is None:
        return [*sizes, *["–"] * 8]
    first, token = degree.times.time_to_first_token, degree.times.time_per_output_token
    usd = degree.usd_per_million_tokens
    return [
        *sizes,
        format_bytes(degree.decode_bytes),
        format_three_digits(degree.decode_intensity),
        format_seconds(first),
        _range(first, degree.interval.ttft),
        format_seconds(token),
        _range(token, degree.interval.tpot),
        f"{degree.tokens_per_second:,.0f}",
        "–" if usd is None else f"{usd:.2f}",
    ]


def _range(seconds: float, factor: float) -> str:
    return f"{format_seconds(seconds / factor)} to {format_seconds(seconds * factor)}"


def _remarks(plan: "ServicePlan") -> Iterator[str]:
    best = plan.best
    if best is None:
        return
    if len(plan.fitting) > 1:
        soonest = min(plan.fitting, key=lambda degree: degree.times.time_per_output_token if degree.times else math.inf)
        lowest = "and" if soonest is best else f"tensor {soonest.tensor}"
        yield f"tensor {best.tensor} gives the most tokens per second, {lowest} the lowest TPOT"
    for degree in plan.degrees:
        if degree.reason is not None:
            yield f"tensor {degree.tensor}: {degree.reason}"
    for degree in plan.fitting:
        if degree.times is not None and degree.times.waiting:
            running, held = degree.times.running, plan.load.concurrency / degree.replicas
            yield (
                f"tensor {degree.tensor}: {running:g} of {held:g} requests per replica have room in the cache; the "
                f"others wait, {format_seconds(degree.times.waiting)} on the average"
            )
    if best.interval is not None and not best.interval.measured:
        yield (
            f"{plan.server} was not measured on such a device with {plan.weights} weights: the intervals are what "
            "generations of devices differ by"
        )
    price = plan.cluster.device.price
    if plan.usd_per_hour is None:
        yield "the catalogue has no price of the device: --usd-per-hour"
    elif price is not None and price.usd_per_hour == plan.usd_per_hour:
        yield f"price of one device: {price}"


def service_json(plan: "ServicePlan") -> dict[str, Any]:
    """The plan for programs: bytes, FLOPs, seconds and dollars."""
    load = plan.load
    return {
        "device": plan.cluster.device.name,
        "devices": plan.cluster.n_devices,
        "server": plan.server,
        "weights": plan.weights,
        "kv": plan.kv,
        "concurrency": load.concurrency,
        "input_tokens": load.input_tokens,
        "output_tokens": load.output_tokens,
        "requests_per_client": None if math.isinf(load.requests_per_client) else load.requests_per_client,
        "parameters": plan.work.parameters,
        "weight_bytes": plan.weight_bytes,
        "ridge": plan.ridge,
        "prefill_flops": plan.prefill_flops,
        "prefill_bytes": plan.prefill_bytes,
        "prefill_intensity": plan.prefill_intensity,
        "usd_per_hour": plan.usd_per_hour,
        "degrees": [
            {**dataclasses.asdict(degree), "decode_intensity": degree.decode_intensity} for degree in plan.degrees
        ],
        "notes": list(plan.notes),
    }
