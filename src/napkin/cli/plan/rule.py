"""`napkin plan --params N ...`: a plan by rules of thumb, without a recipe.

Three questions: what a training run takes (--tokens), what can be trained in a given time (--within), and how well
devices are used (--tokens-per-second).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from napkin.accounting.failures import RESTART_MINUTES, failure_model
from napkin.accounting.quantities import Unit, format_figure
from napkin.accounting.rules import (
    activation_bytes_rule,
    adamw_bytes_rule,
    all_reduce_seconds_rule,
    attention_flops_rule,
    backward_flops_rule,
    bytes_per_parameter,
    compute_optimal_tokens_rule,
    decode_seconds_rule,
    forward_flops_rule,
    gated_parameters_rule,
    kv_cache_bytes_rule,
    largest_model_rule,
    matmul_flops_rule,
    matmul_intensity_rule,
    parameters_rule,
    seconds_rule,
    training_flops_rule,
)
from napkin.cli.common.options import INLINED, JsonOption, Switch, command
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.cli.plan.failure_lines import FailureOptions, failure_rows, is_worth_saying
from napkin.errors import NapkinError
from napkin.hardware.cluster import find_cluster
from napkin.hardware.device import Device
from napkin.planning.step.failure_cost import failures_of_run
from napkin.recipe.training_config import OptimizerName
from napkin.runs.accounting_files import PlannedFailures
from napkin.units import (
    format_bytes,
    format_count,
    format_flops,
    format_rate,
    format_seconds,
    format_share,
    parse_count,
    parse_seconds,
)


@dataclass(frozen=True)
class RuleSizes:
    """Sizes for --rules; a rule without its sizes is left out."""

    batch_size: int = 1
    """Sequences of a step, and sequences that are generated at a time."""
    context_length: int = 2048
    """Tokens per sequence."""
    n_layers: int | None = None
    """Blocks."""
    d_model: int | None = None
    """Width."""
    n_heads: int | None = None
    """Heads of attention."""
    n_kv_heads: int | None = None
    """Heads of keys and values; None is as many as there are heads."""
    d_ff: int | None = None
    """Width of the feed-forward layer; None is four times the width."""
    vocab_size: int | None = None
    """Number of token ids."""
    optimizer: OptimizerName = "adamw"
    """Optimizer."""


@dataclass(frozen=True)
class SizedRule:
    """A quantity by its rule."""

    quantity: str
    formula: str
    unit: Unit
    rule: float


def rules_by_size(
    parameters: float, active: float, sizes: RuleSizes, device: Device | None, n_devices: int
) -> list[SizedRule]:
    """All rules whose sizes are known, in the order in which a plan is made.

    `active` are the parameters that a token is computed with: all, except for a mixture of experts. Raises NapkinError
    for a size that is not above 0.
    """
    for name, value in vars(sizes).items():
        if isinstance(value, int) and value < 1:
            raise NapkinError(f"--{name.replace('_', '-')} is {value}: use a number above 0")
    heads, width = sizes.n_heads, sizes.d_model
    if heads and width and width % heads:
        raise NapkinError(f"--d-model {width} does not divide among --n-heads {heads}")
    return [
        *_of_the_model(active, sizes),
        *_of_a_step(active, sizes),
        *_of_training_bytes(parameters, sizes, device, n_devices),
        *_of_generating(parameters, sizes, device),
    ]


def print_rules_by_size(rows: list[SizedRule], sizes: RuleSizes) -> None:
    """Print the rules, and which sizes would add others."""
    cells = [
        (
            row.quantity,
            row.formula,
            format_count(row.rule) if row.unit == "count" else format_figure(row.rule, row.unit),
        )
        for row in rows
    ]
    print_table(("rule", "formula", "by rule"), cells, align="llr")
    missing = [name for name in ("n_layers", "d_model", "n_heads", "vocab_size") if getattr(sizes, name) is None]
    if missing:
        say(f"{', '.join('--' + name.replace('_', '-') for name in missing)} would add rules", style="dim")


def _of_the_model(active: float, sizes: RuleSizes) -> Iterator[SizedRule]:
    layers, width, vocabulary = sizes.n_layers, sizes.d_model, sizes.vocab_size
    if layers and width and vocabulary:
        shape = {"vocab_size": vocabulary, "d_model": width, "n_layers": layers}
        yield SizedRule("parameters", "12·L·d² + V·d", "count", parameters_rule(**shape, tied=True))
        if sizes.d_ff and sizes.n_heads:
            heads = {"d_ff": sizes.d_ff, "n_heads": sizes.n_heads, "n_kv_heads": sizes.n_kv_heads or sizes.n_heads}
            gated = gated_parameters_rule(**shape, **heads, tied=True)
            yield SizedRule("parameters, gated", "L·d·(2·d + 2·d·kv/h + 3·ff) + V·d", "count", gated)
    yield SizedRule("tokens to train on", "20·N", "count", compute_optimal_tokens_rule(active))


def _of_a_step(active: float, sizes: RuleSizes) -> Iterator[SizedRule]:
    tokens = sizes.batch_size * sizes.context_length
    yield SizedRule("FLOPs, forward", "2·N·b·s", "FLOP", forward_flops_rule(active, tokens))
    yield SizedRule("FLOPs, backward", "4·N·b·s", "FLOP", backward_flops_rule(active, tokens))
    yield SizedRule("FLOPs, training", "6·N·b·s", "FLOP", training_flops_rule(active, tokens))
    if sizes.n_layers and sizes.d_model:
        attention = attention_flops_rule(
            n_layers=sizes.n_layers, d_model=sizes.d_model, context_length=sizes.context_length, tokens=tokens
        )
        yield SizedRule("FLOPs, attention", "12·L·d·s·b·s", "FLOP", attention)
    if sizes.d_model:
        m, k, n = tokens, sizes.d_model, sizes.d_ff or 4 * sizes.d_model
        yield SizedRule("FLOPs, largest product", "2·b·s·d·ff", "FLOP", matmul_flops_rule(m, k, n))
        intensity = matmul_intensity_rule(m, k, n)
        yield SizedRule("its arithmetic intensity", "FLOPs / bytes, in 16 bits", "FLOP/byte", intensity)


def _of_training_bytes(
    parameters: float, sizes: RuleSizes, device: Device | None, n_devices: int
) -> Iterator[SizedRule]:
    each = bytes_per_parameter(sizes.optimizer)
    state = adamw_bytes_rule(parameters, bytes_per_parameter=each)
    yield SizedRule(f"bytes, {sizes.optimizer}", f"{each}·N", "bytes", state)
    if device:
        memory = n_devices * device.advertised_bytes
        largest = largest_model_rule(memory, bytes_per_parameter=each)
        yield SizedRule("largest model", f"memory / {each}", "count", largest)
    if sizes.d_model and sizes.n_heads:
        formulas: dict[Literal["plain", "flash", "checkpointed"], str] = {
            "plain": "s·b·d·(34 + 5·h·s/d)",
            "flash": "34·s·b·d",
            "checkpointed": "2·s·b·d",
        }
        for form, formula in formulas.items():
            kept = activation_bytes_rule(
                batch_size=sizes.batch_size,
                context_length=sizes.context_length,
                d_model=sizes.d_model,
                n_heads=sizes.n_heads,
                form=form,
            )
            yield SizedRule(f"activations per layer, {form}", formula, "bytes", kept)
    link = device.link_bandwidth or device.host_bandwidth if device else None
    if link and n_devices > 1:
        seconds = all_reduce_seconds_rule(4 * parameters, n_devices, link)
        yield SizedRule("all-reduce of gradients", "2·(n-1)/n · 4·N / link", "seconds", seconds)


def _of_generating(parameters: float, sizes: RuleSizes, device: Device | None) -> Iterator[SizedRule]:
    if not (sizes.n_layers and sizes.d_model and sizes.n_heads):
        return
    cache = kv_cache_bytes_rule(
        n_layers=sizes.n_layers,
        n_kv_heads=sizes.n_kv_heads or sizes.n_heads,
        head_dim=sizes.d_model // sizes.n_heads,
        context_length=sizes.context_length,
    )
    yield SizedRule("KV cache of a sequence", "2·L·kv·c·s·2", "bytes", cache)
    yield SizedRule(f"KV cache of {sizes.batch_size:,}", "b·KV", "bytes", sizes.batch_size * cache)
    if device:
        bandwidth = device.memory_bandwidth
        step = decode_seconds_rule(2 * parameters, cache, bandwidth, batch_size=sizes.batch_size)
        yield SizedRule("latency of a token", "(2·N + b·KV) / B", "seconds", step)
        yield SizedRule("throughput", "b / latency", "tokens/s", sizes.batch_size / step)


CHOOSES = {"--params", "--active-params", "--within", "--tokens-per-second"}
"""Options that choose a plan by rule."""
USUAL_MFU = 0.5
CHECKPOINT_BYTES_PER_PARAMETER = 12
"""Weight and two moments of AdamW, in fp32."""
LARGE = 100 * 10**9
"""Parameters from which on models are mostly mixtures of experts."""


@dataclass(frozen=True)
class PlanByRuleOptions(FailureOptions, JsonOption):
    """Plan by rule alone: 6 FLOPs per parameter and token.

    What training takes: --params 70B --tokens 15T --on 1024xH100. What a week is enough for: --on 8xH100 --within
    1week. How well devices are used: --params 7B --tokens-per-second 90k --on 8xH100."""

    params: str | None = None
    """Parameters: 124M, 70B."""
    active_params: str | None = None
    """Parameters that a token is computed with, of a mixture of experts: 37B of --params 671B."""
    tokens: str | None = None
    """Tokens: 300B, 15T. None is 20 per parameter, which is compute-optimal."""
    on: str | None = None
    """Devices: H100, 1024xH100, 8xmydevice.toml; `napkin hardware` lists them."""
    within: str | None = None
    """A time to train for: 36h, 10days, 1week."""
    tokens_per_second: str | None = None
    """Tokens per second of all devices, measured: 90k."""
    mfu: float | None = None
    """Model FLOPs utilization, a fraction of the dense peak; 0.5, if it is not given, is good."""
    format: str = "auto"
    """Number format of the matrix products; auto is bf16, or fp16 or fp32 on devices without it."""
    rules: Switch = False
    """Also print the other rules of thumb, as far as the sizes below are given."""
    sizes: Annotated[RuleSizes, INLINED] = field(default_factory=RuleSizes)


@dataclass(frozen=True)
class _Devices:
    """What --on names."""

    device: Device
    n: int
    n_nodes: int
    format: str
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> float:
        """Dense FLOP/s of all devices."""
        return self.n * self.device.peak(self.format)

    def __str__(self) -> str:
        rate = format_rate(self.device.peak(self.format))
        return f"{self.n:,} × {rate} dense {self.format} ({self.device.name})"


@command("plan", PlanByRuleOptions)
def main(options: PlanByRuleOptions) -> None:
    if options.mfu is not None and not 0 < options.mfu <= 1:
        raise NapkinError(f"--mfu is {options.mfu}: use a fraction above 0, up to 1")
    options.refuse_impossible()
    parameters = _above_zero("params", options.params)
    active = _above_zero("active-params", options.active_params) or parameters
    if active and not parameters:
        raise NapkinError("--active-params are a part of --params: give both, as in --params 671B --active-params 37B")
    if parameters and active and active > parameters:
        raise NapkinError(f"--active-params {options.active_params} is more than --params {options.params}")
    devices = _devices(options) if options.on is not None else None
    if options.within is not None:
        figures, lines = _what_fits_within(options, devices, active)
    elif options.tokens_per_second is not None:
        figures, lines = _utilisation(options, devices, active)
    else:
        figures, lines = _what_it_takes(options, devices, parameters, active)
    _answer(options, devices, parameters, figures, lines, active or figures["parameters"])


def _answer(
    options: PlanByRuleOptions,
    devices: _Devices | None,
    parameters: int | None,
    figures: dict[str, Any],
    lines: list[tuple[str, str]],
    active: float,
) -> None:
    if "failures" not in figures and (options.mtbf_hours, options.restart_minutes) != (None, None):
        raise NapkinError(
            "--mtbf-hours and --restart-minutes are for the time that a run takes: give --params, --tokens and --on"
        )
    lines += [("format", note) for note in (devices.notes if devices else ())]
    # What --within finds may be the number of parameters.
    known, (device, n) = parameters or active, (devices.device, devices.n) if devices else (None, 1)
    rows = rules_by_size(known, active, options.sizes, device, n)
    if options.json:
        named = {"device": devices.device.name, "format": devices.format} if devices else {}
        print_json({**named, **figures, **({"rules": [vars(row) for row in rows]} if options.rules else {})})
        return
    for name, text in lines:
        say(f"{name:<8} {text}")
    if parameters and parameters >= LARGE and options.active_params is None:
        say(
            "If it is a mixture of experts, a token is computed with a part of its parameters: --active-params 37B, "
            "for example"
        )
    if options.rules:
        print_rules_by_size(rows, options.sizes)
    restarts = "" if "failures" in figures else ", and restarts"
    say(f"The rule ignores attention over long contexts{restarts}; `napkin plan recipe.toml` counts a real step.")


def _what_it_takes(
    options: PlanByRuleOptions, devices: _Devices | None, parameters: int | None, active: int | None
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """FLOPs of a training run, and on devices its time, dollars and energy."""
    assert parameters
    assert active
    tokens = _above_zero("tokens", options.tokens)
    lines = []
    if tokens is None:
        tokens = round(compute_optimal_tokens_rule(active))
        lines.append(("tokens", f"20 · {format_count(active)} = {format_count(tokens)}, compute-optimal; or --tokens"))
    flops = training_flops_rule(active, tokens)
    figures: dict[str, Any] = {"flops": flops, "parameters": parameters, "tokens": tokens}
    formula = f"6 · {format_count(active)} · {format_count(tokens)}"
    lines.append(("FLOPs", f"{formula} = {format_flops(flops)} ({flops:.3g})"))
    if devices is None:
        lines.append(("time", "--on 8xH100, for example, adds time, dollars and energy"))
    else:
        mfu = options.mfu or USUAL_MFU
        seconds = seconds_rule(flops, devices.peak, mfu=mfu)
        lines.append(("rate", f"{devices} × MFU {mfu}"))
        lines.append(("time", f"{_days(seconds)}, {format_count(devices.n * seconds / 3600)} device hours"))
        figures |= {"seconds": seconds, "days": seconds / 86400} | _spent(devices, seconds, lines)
        figures |= _with_failures(options, devices, parameters, seconds, figures["dollars"], lines)
    state = adamw_bytes_rule(parameters)
    of = f" of {format_bytes(devices.n * devices.device.advertised_bytes)}" if devices else ""
    lines.append(
        ("memory", f"16 · {format_count(parameters)} = {format_bytes(state)}{of}, without activations (AdamW)")
    )
    return {**figures, "state_bytes": state}, lines


def _what_fits_within(
    options: PlanByRuleOptions, devices: _Devices | None, active: int | None
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """FLOPs of devices in a time, and what can be trained with them."""
    if options.tokens_per_second is not None:
        raise NapkinError("--within and --tokens-per-second are two questions: ask one of them")
    if devices is None:
        raise NapkinError("--within needs devices: add --on 8xH100, for example")
    assert options.within is not None
    seconds = parse_seconds(options.within)
    if not seconds:
        raise NapkinError(f"--within is {options.within}: use a time above 0")
    wanted = _above_zero("tokens", options.tokens)
    if active and wanted:
        raise NapkinError("--within with --params and --tokens leaves nothing to find: leave one of them out")
    mfu = options.mfu or USUAL_MFU
    flops = devices.peak * mfu * seconds
    lines = [("FLOPs", f"{devices} × MFU {mfu} × {_days(seconds)} = {format_flops(flops)} ({flops:.3g})")]
    model: float
    tokens: float
    if active:
        model, tokens = active, flops / training_flops_rule(active, 1)
        lines.append(("tokens", f"FLOPs / (6 · {format_count(active)}) = {_per_parameter(tokens, active)}"))
    elif wanted:
        model, tokens = flops / training_flops_rule(1, wanted), wanted
        found = f"FLOPs / (6 · {format_count(tokens)}) = {format_count(model)} parameters"
        lines.append(("model", f"{found}: {format_count(tokens / model)} tokens per parameter"))
    else:
        # 6·N·T with T = 20·N.
        model = math.sqrt(flops / training_flops_rule(1, compute_optimal_tokens_rule(1)))
        tokens = compute_optimal_tokens_rule(model)
        found = f"√(FLOPs / 120) = {format_count(model)} parameters on 20 · N = {format_count(tokens)} tokens"
        lines.append(("model", f"{found}, compute-optimal"))
    figures = {"flops": flops, "parameters": model, "tokens": tokens, "seconds": seconds, "days": seconds / 86400}
    return figures | _spent(devices, seconds, lines), lines


def _utilisation(
    options: PlanByRuleOptions, devices: _Devices | None, active: int | None
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The MFU of a measured rate."""
    rate = _above_zero("tokens-per-second", options.tokens_per_second)
    if devices is None or not active or rate is None:
        raise NapkinError("--tokens-per-second needs a model and devices: add --params 7B --on 8xH100, for example")
    if options.mfu is not None:
        raise NapkinError("--mfu is what --tokens-per-second finds: leave it out")
    mfu = training_flops_rule(active, rate) / devices.peak
    above = ", which is impossible: check the numbers and --format" if mfu > 1 else ""
    formula = f"6 · {format_count(active)} · {format_count(rate)}/s / ({devices})"
    lines = [("MFU", f"{formula} = {format_share(mfu)}{above}")]
    figures: dict[str, Any] = {"mfu": mfu, "parameters": active, "tokens_per_second": rate}
    tokens = _above_zero("tokens", options.tokens)
    if tokens:
        seconds = tokens / rate
        lines.append(("time", f"{format_count(tokens)} / {format_count(rate)}/s = {_days(seconds)}"))
        figures |= {"tokens": tokens, "seconds": seconds, "days": seconds / 86400} | _spent(devices, seconds, lines)
    return figures, lines


def _devices(options: PlanByRuleOptions) -> _Devices:
    assert options.on is not None
    cluster = find_cluster(options.on)
    n, n_nodes, device = cluster.n_devices, cluster.n_nodes, cluster.device
    if options.format != "auto":
        device.peak(options.format)
        return _Devices(device, n, n_nodes, options.format)
    chosen = next((name for name in ("bf16", "fp16", "fp32") if name in device.peaks), next(iter(device.peaks)))
    note = f"{chosen}: the catalogue has no bf16 for {device.name}; --format chooses another"
    return _Devices(device, n, n_nodes, chosen, () if chosen == "bf16" else (note,))


def _spent(devices: _Devices, seconds: float, lines: list[tuple[str, str]]) -> dict[str, float | None]:
    """Dollars and energy of all devices for so long; adds their lines."""
    device, device_hours = devices.device, devices.n * seconds / 3600
    dollars = device_hours * device.price.usd_per_hour if device.price else None
    kilowatt_hours = device_hours * device.watts / 1000 if device.watts else None
    if dollars is not None:
        lines.append(("price", f"${format_count(dollars)} at {device.price}"))
    if kilowatt_hours is not None:
        energy = f"{format_count(kilowatt_hours)} kWh at {device.watts:.0f} W per board, without cooling"
        lines.append(("energy", energy))
    return {"device_hours": device_hours, "dollars": dollars, "kilowatt_hours": kilowatt_hours}


def _with_failures(
    options: PlanByRuleOptions,
    devices: _Devices,
    parameters: int,
    seconds: float,
    dollars: float | None,
    lines: list[tuple[str, str]],
) -> dict[str, PlannedFailures]:
    """The same run with failures and checkpoints at the best interval; adds its lines."""
    given = options.mtbf_hours is not None
    written = CHECKPOINT_BYTES_PER_PARAMETER * parameters
    model = failure_model(
        n_devices=devices.n,
        copied_bytes=written / devices.n,
        written_bytes=written,
        writing_nodes=devices.n_nodes,
        host_bandwidth=devices.device.host_bandwidth,
        mtbf_hours=options.mtbf_hours,
        restart_minutes=RESTART_MINUTES if options.restart_minutes is None else options.restart_minutes,
    )
    failures = failures_of_run(model, seconds, useful_dollars=dollars)
    if is_worth_saying(seconds, devices.n, given=given):
        lines += failure_rows(failures, given=given)
    return {"failures": failures}


def _days(seconds: float) -> str:
    return f"{seconds / 86400:,.2f} days" if seconds > 86400 else format_seconds(seconds)


def _per_parameter(tokens: float, parameters: float) -> str:
    return f"{format_count(tokens)} tokens: {format_count(tokens / parameters)} per parameter, 20 is compute-optimal"


def _above_zero(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    value = parse_count(text)
    if not value:
        raise NapkinError(f"--{name} is {text}: use a number above 0")
    return value
