"""`napkin plan --serve ...`: what serving a model takes: of a catalogue's devices by degree of tensor parallelism, or,
without --on, of napkin's own engine on this machine."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from napkin.cli.common.options import JsonOption
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeOptions, RecipeSource, recipe_command
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.errors import NapkinError
from napkin.units import format_bytes, format_flops, format_seconds, format_three_digits

if TYPE_CHECKING:
    from napkin.model.config import ModelConfig
    from napkin.planning.services.service_curve import ServiceCurve, ServiceCurves, ServicePoint
    from napkin.planning.services.service_plan import ServiceDegree, ServicePlan


@dataclass(frozen=True)
class ServiceOptions(RecipeOptions, JsonOption):
    """Plan a service: memory, time to first token (TTFT), time per output token (TPOT), tokens per second and dollars
    under a constant number of concurrent requests, for each degree of tensor parallelism of the devices. Of the recipe
    only the model is read: napkin plan service --preset llama-3-8b --on 8xH100 --concurrency 64."""

    # Lengths that vary, clients and the numbers of a draft are left to a section.
    FIRST: ClassVar[tuple[str, ...]] = (
        *("preset", "on", "concurrency", "rate", "input-tokens", "output-tokens", "server", "weights", "kv", "tensor"),
        *("draft", "curve", "usd-per-hour", "json"),
        *("model.vocab-size", "model.context-length", "model.d-model", "model.n-layers", "model.n-heads"),
        *("training.batch-size", "training.precision"),
    )
    on: str | None = None
    """Accelerators: H100, 8xH100, 8xmydevice.toml; `napkin hardware` lists them. None is napkin's own engine on this
    machine, whose steps are timed."""
    concurrency: int = 64
    """Requests in flight: as one ends, the next comes."""
    rate: float | None = None
    """Requests per second at random moments, in place of a constant number in flight."""
    input_tokens: int = 1024
    """Tokens of each prompt."""
    output_tokens: int = 256
    """Tokens that each request generates."""
    shortest: float = 1.0
    """On devices, lengths are drawn uniformly between this fraction of the stated length and the stated length. With
    one length for all, requests that start together stay together, and wait for each other's prompts."""
    server: Literal["auto", "vllm", "trtllm", "sglang"] = "auto"
    """The server whose measured constants are used; auto is vllm on devices, and napkin's own engine on this
    machine."""
    weights: Literal["bf16", "fp8", "fp8_block", "nvfp4"] = "bf16"
    """Format of the blocks' matrices; embedding and head are in bf16."""
    kv: Literal["auto", "bf16", "fp8", "int8"] = "auto"
    """Format of the KV cache; auto is fp8 for weights that are narrower than bf16. napkin's own engine has bf16 and
    int8, the other servers bf16 and fp8."""
    tensor: int | None = None
    """Devices that divide the matrices of a replica; None compares all degrees."""
    requests_per_client: int | None = None
    """Requests that each client sends, as in a measurement that the plan is compared with, where the first requests of
    all clients come at the same time. None plans the steady state after the first ones; on this machine 4 are
    simulated."""
    draft: str | None = None
    """A smaller model that proposes tokens: a preset's name, a run, a Hugging Face folder or a GGUF file. Its weights
    and its cache are planned, and the tokens per pass that --acceptance makes."""
    acceptance: float | None = None
    """Share of the draft's proposals that are accepted, which napkin generate --draft measures; needed for a draft."""
    proposed: int = 4
    """Tokens that the draft proposes for each pass of the model."""
    usd_per_hour: float | None = None
    """Price of one device; None is the catalogue's, if it has one."""
    curve: bool = False
    """On devices, plan 1 to 1,024 requests in flight in place of one number, and name the knee of each degree."""


@recipe_command("plan service", ServiceOptions)
def main(options: ServiceOptions, _: RecipeSource) -> None:
    if options.curve:
        _curve(options)
        return
    with progress_line("counting prefill and decode") as line:
        from napkin.planning.services.service_planner import plan_service

        plan = plan_service(
            options.recipe.model,
            options.on,
            concurrency=options.concurrency if options.rate is None else None,
            rate=options.rate,
            **_service_of(options),
            requests_per_client=options.requests_per_client,
            draft=None if options.draft is None else _draft_config(options.draft),
            acceptance=options.acceptance,
            proposed=options.proposed,
            progress=line.retitle,
        )
    if options.json:
        print_json(plan.as_values())
    else:
        print_service(plan)
    if plan.best is None:
        raise NapkinError(f"the service does not fit: {plan.degrees[-1].reason}")
    for note in plan.notes:
        notify(note)


def _service_of(options: ServiceOptions) -> dict[str, Any]:
    """The arguments that a plan of one load and curves over many loads share: the requests, the server, formats, ranks
    and price."""
    return {
        **{name: getattr(options, name) for name in ("input_tokens", "output_tokens", "shortest", "weights", "tensor")},
        "server": None if options.server == "auto" else options.server,
        "kv": None if options.kv == "auto" else options.kv,
        "usd_per_hour": options.usd_per_hour,
    }


def _draft_config(named: str) -> "ModelConfig":
    """The config of a draft. Raises NapkinError where the name is neither that of a preset nor of a model."""
    from napkin.inference.loaded_model import load
    from napkin.model.config import preset

    return load(named).config if Path(named).exists() else preset(named)


def _curve(options: ServiceOptions) -> None:
    """Plan and print the curves. Raises NapkinError without devices, and for what fixes another load."""
    if options.on is None:
        raise NapkinError("--curve plans accelerators: name them with --on, as in --on 8xH100")
    for name in ("rate", "draft", "requests_per_client"):
        if getattr(options, name) is not None:
            raise NapkinError(f"--curve plans numbers of requests in flight: leave --{name.replace('_', '-')} out")
    with progress_line("counting prefill and decode") as line:
        from napkin.planning.services.service_curve import service_curves

        curves = service_curves(
            options.recipe.model,
            options.on,
            **_service_of(options),
            progress=line.retitle,
        )
    if options.json:
        print_json(curves.as_values())
    else:
        print_curves(curves)
    if curves.best() is None:
        raise NapkinError(f"the service does not fit: {curves.curves[-1].reason}")
    for note in curves.plan.notes:
        notify(note)


def print_curves(found: "ServiceCurves") -> None:
    """Print a row for each number of requests in flight and each degree, the knees marked."""
    plan = found.plan
    assert plan.cluster is not None
    load = f"requests of {plan.load.input_tokens:g} + {plan.load.output_tokens:g} tokens"
    where = f"{plan.cluster.n_devices} × {plan.cluster.device.name}"
    say(f"plan of a service on {where}: {load}, {plan.server}, weights in {plan.weights}, cache in {plan.kv}")
    headings = ("tensor", "in flight", "TTFT", "TPOT", "request", "tokens/s", "$/M tokens", "")
    rows = [_curve_cells(curve, point) for curve in found.curves for point in curve.points]
    print_table(headings, rows, align="rrrrrrrl")
    say(
        "knee: the most tokens per second over the seconds of a request; beyond it, requests mostly wait",
        style="dim",
    )
    for curve in found.curves:
        if curve.reason is not None:
            say(f"tensor {curve.tensor}: {curve.reason}")


def _curve_cells(curve: "ServiceCurve", point: "ServicePoint") -> tuple[str, ...]:
    usd = point.degree.usd_per_million_tokens
    return (
        str(curve.tensor),
        f"{point.concurrency:,}",
        format_seconds(point.times.time_to_first_token),
        format_seconds(point.times.time_per_output_token),
        format_seconds(point.request_seconds),
        f"{point.tokens_per_second:,.0f}",
        "–" if usd is None else f"{usd:.2f}",
        "knee" if point is curve.knee else "some wait for room" if point.waits else "",
    )


def print_service(plan: "ServicePlan") -> None:
    """Print the counted figures beside their rules of thumb, then a row per degree of tensor parallelism."""
    cluster, server = plan.cluster, plan.server
    where = "napkin's own engine on this machine"
    if cluster is not None:
        where = f"a service on {cluster.n_devices} × {cluster.device.name}"
    elif plan.best is not None and plan.best.times is not None:
        server = f"{plan.best.times.running:g} running at a time"
    say(f"plan of {where}: {plan.requests}, {server}, weights in {plan.weights}, cache in {plan.kv}")
    print_table(("", "rule", "count", ""), list(_counted(plan)), align="lrrl")
    say()
    headings = ["tensor", "replicas", "weights", "left for KV", "sequences fit", "decode step reads", "FLOP/B"]
    headings += ["TTFT", "nine in ten", "TPOT", "nine in ten", "tokens/s", "$/M tokens"]
    print_table(headings, [_cells(degree) for degree in plan.degrees])
    say(
        "bytes are of one device, sequences of one replica, tokens (those generated) and dollars of all devices",
        style="dim",
    )
    if plan.best is not None and (simulation := plan.best.simulation) is not None:
        say()
        rows = [
            (name, *(format_seconds(of(percent)) for percent in (50, 90, 99)))
            for name, of in (
                ("time to first token", simulation.first_token),
                ("time per output token", simulation.per_token),
            )
        ]
        print_table((f"tensor {plan.best.tensor}", "median", "90%", "99%"), rows, align="lrrr")
        if cluster is None:
            say("steps were timed, their schedule simulated", style="dim")
    if plan.best is not None:
        for line in _remarks(plan, plan.best):
            say(line)


def _counted(plan: "ServicePlan") -> Iterator[tuple[str, str, str, str]]:
    from napkin.accounting.rules import forward_flops_rule
    from napkin.planning.rules import cache_numbers_by_rule, state_bytes_by_rule

    load, work, model = plan.load, plan.work, plan.model
    rule = format_flops(forward_flops_rule(work.parameters, load.input_tokens))
    yield "prefill of a prompt", rule, format_flops(plan.prefill_flops), "2·N·T"
    rule = format_flops(forward_flops_rule(work.parameters, 1))
    context = load.input_tokens + load.output_tokens / 2
    yield "decode, a token", rule, format_flops(work.decode_flops(1, context)), f"2·N; {context:g} tokens in the cache"
    rule = format_bytes(work.parameters * plan.weight_width)
    yield "weights", rule, format_bytes(plan.weight_bytes), "N·bytes"
    longest = load.input_tokens + load.output_tokens
    numbers, formula = cache_numbers_by_rule(model, round(longest))
    # The engine keeps what is beyond a window.
    counted = work.kv_numbers * (longest if plan.cluster is None else work.kept(longest)) * plan.kv_width
    if numbers:
        yield "KV of a sequence", format_bytes(numbers * plan.kv_width), format_bytes(counted), f"{formula}·bytes"
    if (draft := plan.draft) is not None:
        numbers = format_bytes(draft.weight_bytes), format_bytes(draft.kv_bytes_per_sequence)
        rule = format_bytes(2 * draft.parameters) if plan.cluster is not None else ""
        yield "weights of the draft", rule, numbers[0], "N·bytes" if rule else ""
        yield "draft's KV of a sequence", "", numbers[1], ""
        tokens = format_three_digits(draft.tokens_per_pass)
        yield "tokens per pass", tokens, "", f"(1 - α^(γ + 1)) / (1 - α), α {draft.acceptance:g}, γ {draft.proposed}"
    if model.has_states:
        rule = format_bytes(state_bytes_by_rule(model))
        formula = "L·(4·n·w + 2·(k-1)·u); read and written for each token"
        yield "states of a sequence", rule, format_bytes(work.state_bytes), formula
    if plan.ridge is None:
        return
    bound = "arithmetic" if plan.prefill_intensity > plan.ridge else "bytes"
    yield "prefill, FLOPs per byte", "", format_three_digits(plan.prefill_intensity), f"bound by {bound}"
    yield "ridge, FLOPs per byte", "", format_three_digits(plan.ridge), "of the device, by its datasheet"


def _cells(degree: "ServiceDegree") -> list[str]:
    memory = [format_bytes(degree.weight_bytes), format_bytes(max(0.0, degree.kv_pool_bytes))]
    sizes = [str(degree.tensor), str(degree.replicas), *memory, f"{degree.sequences:,}"]
    if degree.times is None or degree.tokens_per_second is None:
        return [*sizes, *["–"] * 8]
    first, token = degree.times.time_to_first_token, degree.times.time_per_output_token
    usd = degree.usd_per_million_tokens
    return [
        *sizes,
        format_bytes(degree.decode_bytes),
        format_three_digits(degree.decode_intensity),
        format_seconds(first),
        _range(first, degree.interval and degree.interval.ttft),
        format_seconds(token),
        _range(token, degree.interval and degree.interval.tpot),
        f"{degree.tokens_per_second:,.0f}",
        "–" if usd is None else f"{usd:.2f}",
    ]


def _range(seconds: float, factor: float | None) -> str:
    if factor is None:
        return "–"
    return f"{format_seconds(seconds / factor)} to {format_seconds(seconds * factor)}"


def _remarks(plan: "ServicePlan", best: "ServiceDegree") -> Iterator[str]:
    if (draft := plan.draft) is not None:
        yield (
            f"a pass gives {format_three_digits(draft.tokens_per_pass)} tokens and takes "
            f"{format_seconds(draft.draft_seconds)} of the draft and {format_seconds(draft.pass_seconds)} of the "
            f"model, a step without a draft {format_seconds(draft.plain_seconds)}: decoding is "
            f"{draft.improvement:.2f} times as fast"
        )
    if len(plan.fitting) > 1:
        soonest = min(plan.fitting, key=lambda degree: degree.times.time_per_output_token if degree.times else math.inf)
        lowest = "and" if soonest is best else f"tensor {soonest.tensor}"
        yield f"tensor {best.tensor} gives the most tokens per second, {lowest} the lowest TPOT"
    for degree in plan.degrees:
        if degree.reason is not None:
            yield f"tensor {degree.tensor}: {degree.reason}"
    for degree in plan.fitting:
        requests = (plan.load.concurrency or 0) / degree.replicas
        if degree.times is None:
            continue
        if requests > (degree.sequences if plan.cluster else degree.times.running):
            running = format_three_digits(degree.times.running)
            yield (
                f"tensor {degree.tensor}: {running} of {requests:g} requests per replica are computed at a time; the "
                f"others wait, {format_seconds(degree.times.waiting)} on the average"
            )
    if best.interval is not None and not best.interval.measured:
        yield (
            f"{plan.server} was not measured on such a device with {plan.weights} weights"
            f"{' and experts' if plan.work.n_experts else ''}: the intervals are what generations of devices differ by"
        )
    if plan.cluster is None:
        return
    price = plan.cluster.device.price
    if plan.usd_per_hour is None:
        yield "the catalogue has no price of the device: --usd-per-hour"
    elif price is not None and price.usd_per_hour == plan.usd_per_hour:
        yield f"price of one device: {price}"
