"""Plans by rules of thumb, without a model: 6 FLOPs per parameter and token on devices of the catalogue.

Three questions: what training takes (`training_by_rule`), what can be trained in a given time (`affordable_by_rule`),
and how well devices are used (`utilisation_by_rule`). A plan holds its figures and the arithmetic behind them.
`rules_by_size` has all rules whose sizes are known; below it are those of a model's config.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from napkin.accounting.failures import RESTART_MINUTES, failure_model
from napkin.accounting.quantities import Line, Summary
from napkin.accounting.rules import (
    RuleRow,
    Sizes,
    activation_rows,
    adamw_bytes_rule,
    all_reduce_seconds_rule,
    attention_flops_rule,
    attention_row,
    bytes_per_parameter,
    compute_optimal_tokens_rule,
    decode_seconds_rule,
    kv_cache_bytes_rule,
    largest_model_rule,
    latent_attention_parameters_rule,
    latent_cache_bytes_rule,
    layered_parameters_rule,
    matmul_flops_rule,
    matmul_intensity_rule,
    norm_bytes_rule,
    norm_flops_rule,
    parameter_rows,
    seconds_rule,
    step_flops_rows,
    training_flops_rule,
)
from napkin.accounting.state_rules import StateSizes, scan_flops_rule, state_bytes_rule, state_parameters_rule
from napkin.errors import NapkinError
from napkin.hardware.cluster import find_cluster
from napkin.hardware.device import Device
from napkin.model.config import ModelConfig
from napkin.planning.step.failure_cost import failure_rows, failures_are_worth_saying, failures_of_run
from napkin.planning.training_compute import SMALLEST, nearest_line, standing, thresholds_line
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import OptimizerName
from napkin.units import format_bytes, format_count, format_flops, format_rate, format_seconds, format_share

USUAL_MFU = 0.5
CHECKPOINT_BYTES_PER_PARAMETER = 12
"""Weight and two moments of AdamW, in fp32."""


@dataclass(frozen=True)
class RuleDevices:
    """Devices of one kind, and the number format in which they multiply matrices."""

    device: Device
    n: int
    n_nodes: int
    format: str

    @classmethod
    def of(cls, on: str, format: str = "auto") -> "RuleDevices":
        """Find devices by name, as in "8xH100".

        The format "auto" is bf16, or fp16 or fp32 where the catalogue has no bf16. Raises NapkinError for an unknown
        device, or a format that it does not have.
        """
        cluster = find_cluster(on)
        peaks = cluster.device.peaks
        if format == "auto":
            format = next((name for name in ("bf16", "fp16", "fp32") if name in peaks), next(iter(peaks)))
        cluster.device.peak(format)
        return cls(cluster.device, cluster.n_devices, cluster.n_nodes, format)

    @property
    def peak(self) -> float:
        return self.n * self.device.peak(self.format)

    def __str__(self) -> str:
        rate = format_rate(self.device.peak(self.format))
        return f"{self.n:,} × {rate} dense {self.format} ({self.device.name})"


@dataclass(repr=False)
class RulePlan(Summary):
    """The answer to a question: figures for programs, and for people a line for each, with its arithmetic."""

    devices: RuleDevices | None
    parameters: float
    """All parameters, those of experts included."""
    active: float
    """The parameters that a token is computed with."""
    figures: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def summary(self) -> Iterator[Line]:
        yield "plan by rule", str(self.devices or f"{format_count(self.parameters)} parameters")
        yield from self.lines

    def as_values(self) -> dict[str, Any]:
        """The figures with the name of the devices."""
        named = {} if self.devices is None else {"device": self.devices.device.name, "format": self.devices.format}
        return {**named, **self.figures}

    def _compare(self, flops: float) -> None:
        """Say where the FLOPs stand among thresholds of laws and published models, if they come near either."""
        if flops >= SMALLEST:
            self.lines += [("laws", thresholds_line(flops)), ("beside", nearest_line(flops))]
            self.figures["compute"] = standing(flops)

    def _spend(self, seconds: float) -> None:
        """Add seconds of all devices, their dollars and their energy."""
        assert self.devices is not None
        device, hours = self.devices.device, self.devices.n * seconds / 3600
        dollars = hours * device.price.usd_per_hour if device.price else None
        kilowatt_hours = hours * device.watts / 1000 if device.watts else None
        if dollars is not None:
            self.lines.append(("price", f"${format_count(dollars)} at {device.price}"))
        if kilowatt_hours is not None:
            energy = f"{format_count(kilowatt_hours)} kWh at {device.watts:.0f} W per board, without cooling"
            self.lines.append(("energy", energy))
        self.figures |= {"seconds": seconds, "days": seconds / 86400, "device_hours": hours}
        self.figures |= {"dollars": dollars, "kilowatt_hours": kilowatt_hours}


def training_by_rule(
    parameters: float,
    tokens: float | None = None,
    *,
    active: float | None = None,
    devices: RuleDevices | None = None,
    mfu: float = USUAL_MFU,
    mtbf_hours: float | None = None,
    restart_minutes: float | None = None,
) -> RulePlan:
    """FLOPs and bytes of training, and on devices time, dollars, energy and failures.

    Without `tokens` it is 20 per parameter, which is compute-optimal. `active` are the parameters that a token is
    computed with, of a mixture of experts. `mtbf_hours` is the mean time between failures of all devices, by default
    the rate of the Llama 3 405B run; `restart_minutes`, from a failure until training continues, are 10.
    """
    plan = RulePlan(devices, parameters, active or parameters)
    if tokens is None:
        tokens = round(compute_optimal_tokens_rule(plan.active))
        found = f"20 · {format_count(plan.active)} = {format_count(tokens)}"
        plan.lines.append(("tokens", f"{found}, compute-optimal; or --tokens"))
    flops = training_flops_rule(plan.active, tokens)
    plan.figures |= {"flops": flops, "parameters": parameters, "tokens": tokens}
    formula = f"6 · {format_count(plan.active)} · {format_count(tokens)}"
    plan.lines.append(("FLOPs", f"{formula} = {format_flops(flops)} ({flops:.3g})"))
    state, of = adamw_bytes_rule(parameters), ""
    if devices is None:
        plan.lines.append(("time", "--on 8xH100, for example, adds time, dollars and energy"))
    else:
        seconds = seconds_rule(flops, devices.peak, mfu=mfu)
        plan.lines.append(("rate", f"{devices} × MFU {mfu}"))
        plan.lines.append(("time", f"{_days(seconds)}, {format_count(devices.n * seconds / 3600)} device hours"))
        plan._spend(seconds)
        # The run with failures, and checkpoints at the best interval.
        written, given = CHECKPOINT_BYTES_PER_PARAMETER * parameters, mtbf_hours is not None
        model = failure_model(
            n_devices=devices.n,
            copied_bytes=written / devices.n,
            written_bytes=written,
            writing_nodes=devices.n_nodes,
            host_bandwidth=devices.device.host_bandwidth,
            mtbf_hours=mtbf_hours,
            restart_minutes=RESTART_MINUTES if restart_minutes is None else restart_minutes,
        )
        failures = failures_of_run(model, seconds, useful_dollars=plan.figures["dollars"])
        if failures_are_worth_saying(seconds, devices.n, given=given):
            plan.lines += failure_rows(failures, given=given)
        plan.figures["failures"] = failures
        of = f" of {format_bytes(devices.n * devices.device.advertised_bytes)}"
    formula = f"16 · {format_count(parameters)} = {format_bytes(state)}"
    plan.lines.append(("memory", f"{formula}{of}, without activations (AdamW)"))
    plan.figures["state_bytes"] = state
    plan._compare(flops)
    return plan


def affordable_by_rule(
    devices: RuleDevices,
    seconds: float,
    *,
    parameters: float | None = None,
    tokens: float | None = None,
    mfu: float = USUAL_MFU,
) -> RulePlan:
    """The training that devices can do in a time: tokens for a number of parameters, parameters for a number of tokens,
    or, of neither, the compute-optimal model."""
    flops = devices.peak * mfu * seconds
    if parameters is not None:
        tokens = flops / training_flops_rule(parameters, 1)
        ratio = f"{format_count(tokens / parameters)} per parameter, 20 is compute-optimal"
        rule = "tokens", f"FLOPs / (6 · {format_count(parameters)}) = {format_count(tokens)} tokens: {ratio}"
    elif tokens is not None:
        parameters = flops / training_flops_rule(1, tokens)
        formula = f"FLOPs / (6 · {format_count(tokens)}) = {format_count(parameters)} parameters"
        rule = "model", f"{formula}: {format_count(tokens / parameters)} tokens per parameter"
    else:
        # 6·N·T with T = 20·N.
        parameters = math.sqrt(flops / training_flops_rule(1, compute_optimal_tokens_rule(1)))
        tokens = compute_optimal_tokens_rule(parameters)
        formula = f"√(FLOPs / 120) = {format_count(parameters)} parameters on 20 · N = {format_count(tokens)} tokens"
        rule = "model", f"{formula}, compute-optimal"
    plan = RulePlan(devices, parameters, parameters)
    bought = f"{devices} × MFU {mfu} × {_days(seconds)} = {format_flops(flops)} ({flops:.3g})"
    plan.lines += [("FLOPs", bought), rule]
    plan.figures |= {"flops": flops, "parameters": parameters, "tokens": tokens}
    plan._spend(seconds)
    plan._compare(flops)
    return plan


def utilisation_by_rule(
    devices: RuleDevices, parameters: float, tokens_per_second: float, *, tokens: float | None = None
) -> RulePlan:
    """The model-FLOPs utilisation of a measured rate, and the time for so many tokens at it."""
    rate = tokens_per_second
    mfu = training_flops_rule(parameters, rate) / devices.peak
    above = ", which is impossible: check the numbers and --format" if mfu > 1 else ""
    formula = f"6 · {format_count(parameters)} · {format_count(rate)}/s / ({devices})"
    plan = RulePlan(devices, parameters, parameters)
    plan.lines.append(("MFU", f"{formula} = {format_share(mfu)}{above}"))
    plan.figures |= {"mfu": mfu, "parameters": parameters, "tokens_per_second": rate}
    if tokens is not None:
        seconds = tokens / rate
        plan.lines.append(("time", f"{format_count(tokens)} / {format_count(rate)}/s = {_days(seconds)}"))
        plan.figures["tokens"] = tokens
        plan._spend(seconds)
    return plan


def _days(seconds: float) -> str:
    return f"{seconds / 86400:,.2f} days" if seconds > 86400 else format_seconds(seconds)


@dataclass(frozen=True)
class RuleSizes:
    """Sizes for the rules of thumb; a rule without its sizes is left out."""

    batch_size: int = 1
    """Sequences per step, which is also the number of sequences generated at a time."""
    context_length: int = 2048
    """Tokens per sequence."""
    n_layers: int | None = None
    """Number of blocks."""
    d_model: int | None = None
    """Width of the model."""
    n_heads: int | None = None
    """Heads of attention."""
    n_kv_heads: int | None = None
    """Heads of keys and values; None is as many as there are heads."""
    d_ff: int | None = None
    """Width of the feed-forward layer; None is four times the width."""
    vocab_size: int | None = None
    """Number of token ids."""
    optimizer: OptimizerName = "adamw"
    """The optimizer, whose state takes memory."""


def rules_by_size(
    parameters: float, sizes: RuleSizes, *, active: float | None = None, devices: RuleDevices | None = None
) -> list[RuleRow]:
    """All rules whose sizes are known, in the order in which a plan is made.

    `active` are the parameters that a token uses: None is all, as in any model but a mixture of experts. Raises
    NapkinError for a size that is not above 0.
    """
    for name, value in vars(sizes).items():
        if isinstance(value, int) and value < 1:
            raise NapkinError(f"--{name.replace('_', '-')} is {value}: use a number above 0")
    heads, width = sizes.n_heads, sizes.d_model
    if heads and width and width % heads:
        raise NapkinError(f"--d-model {width} does not divide among --n-heads {heads}")
    return list(_rules(parameters, active or parameters, sizes, devices))


def _rules(parameters: float, active: float, sizes: RuleSizes, devices: RuleDevices | None) -> Iterator[RuleRow]:
    layers, width, tokens = sizes.n_layers, sizes.d_model, sizes.batch_size * sizes.context_length
    if layers and width and sizes.vocab_size:
        heads = sizes.n_heads
        gated = (sizes.d_ff, heads, sizes.n_kv_heads or heads) if sizes.d_ff and heads else None
        yield from parameter_rows(vocab_size=sizes.vocab_size, d_model=width, n_layers=layers, tied=True, gated=gated)
    yield RuleRow("tokens to train on", "20·N", "count", compute_optimal_tokens_rule(active))
    yield from step_flops_rows(active, tokens)
    if layers and width:
        yield attention_row(n_layers=layers, d_model=width, context_length=sizes.context_length, tokens=tokens)
    if width:
        product = tokens, width, sizes.d_ff or 4 * width
        yield RuleRow("FLOPs, largest product", "2·T·d·ff", "FLOP", matmul_flops_rule(*product))
        intensity = matmul_intensity_rule(*product)
        yield RuleRow("its arithmetic intensity", "FLOPs / bytes, in 16 bits", "FLOP/byte", intensity)
    if layers and width:
        shape = {"n_layers": layers, "d_model": width}
        share = norm_flops_rule(**shape, tokens=tokens) / training_flops_rule(active, tokens)
        yield RuleRow("norms, of the FLOPs", "(2·L + 1)·12·d / (6·N)", "share", share)
        if devices is not None:
            norms = norm_bytes_rule(**shape, tokens=tokens) / devices.device.memory_bandwidth
            products = seconds_rule(training_flops_rule(active, tokens), devices.peak / devices.n, mfu=USUAL_MFU)
            yield RuleRow(
                "norms, of the seconds", "(2·L + 1)·10·d·T / B beside 6·N·T", "share", norms / (norms + products)
            )
    # Training.
    each = bytes_per_parameter(sizes.optimizer)
    state = adamw_bytes_rule(parameters, bytes_per_parameter=each)
    yield RuleRow(f"bytes, {sizes.optimizer}", f"{each}·N", "bytes", state)
    if devices is not None:
        memory = devices.n * devices.device.advertised_bytes
        largest = largest_model_rule(memory, bytes_per_parameter=each)
        yield RuleRow("largest model", f"memory / {each}", "count", largest)
    shape = {"batch_size": sizes.batch_size, "context_length": sizes.context_length}
    if sizes.d_model and sizes.n_heads:
        yield from (row for _, row in activation_rows(**shape, d_model=sizes.d_model, n_heads=sizes.n_heads))
    link = devices and (devices.device.link_bandwidth or devices.device.host_bandwidth)
    if devices is not None and link and devices.n > 1:
        seconds = all_reduce_seconds_rule(4 * parameters, devices.n, link)
        yield RuleRow("all-reduce of gradients", "2·(n-1)/n · 4·N / link", "seconds", seconds)
    # Generating.
    if not (sizes.n_layers and sizes.d_model and sizes.n_heads):
        return
    cache = kv_cache_bytes_rule(
        n_layers=sizes.n_layers,
        n_kv_heads=sizes.n_kv_heads or sizes.n_heads,
        head_dim=sizes.d_model // sizes.n_heads,
        context_length=sizes.context_length,
    )
    yield RuleRow("KV cache of a sequence", "2·L·kv·c·s·2", "bytes", cache)
    yield RuleRow(f"KV cache of {sizes.batch_size:,}", "b·KV", "bytes", sizes.batch_size * cache)
    if devices is not None:
        bandwidth = devices.device.memory_bandwidth
        step = decode_seconds_rule(2 * parameters, cache, bandwidth, batch_size=sizes.batch_size)
        yield RuleRow("latency of a token", "(2·N + b·KV) / B", "seconds", step)
        yield RuleRow("throughput", "b / latency", "tokens/s", sizes.batch_size / step)


def sizes_of(recipe: Recipe) -> Sizes:
    """The sizes of a resolved recipe of one device."""
    model, training = recipe.model, recipe.training
    return Sizes(
        vocab_size=model.vocab_size,
        d_model=model.d_model,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=model.resolved_n_kv_heads,
        head_dim=model.resolved_head_dim,
        value_dim=model.resolved_v_head_dim,
        latent_cache=None if model.kv_lora_rank is None else (model.kv_lora_rank, model.resolved_qk_rope_head_dim),
        states=_states(model),
        n_kv_layers=model.n_kv_layers,
        d_ff=model.resolved_d_ff,
        tied=model.tie_embeddings,
        gated=model.gated,
        batch_size=training.resolved_micro_batch_size,
        sequences=training.batch_size,
        context_length=model.context_length,
        by_layers=parameters_by_rule(model),
        formula=parameters_formula(model),
        multiplying=multiplying_parameters_by_rule(model),
    )


def parameters_by_rule(model: ModelConfig) -> int:
    """All parameters, those of experts and learned positions included, by `layered_parameters_rule`."""
    return _layered(model, model.n_experts + model.n_shared_experts)


def multiplying_parameters_by_rule(model: ModelConfig) -> int:
    """The parameters that a token is multiplied with: of experts those that it uses, and no table that is looked up."""
    looked_up = (0 if model.tie_embeddings else model.vocab_size) + _learned_positions(model)
    return _layered(model, model.experts_per_token + model.n_shared_experts) - looked_up * model.d_model


def step_flops_by_rule(model: ModelConfig, tokens: float) -> float:
    """6·N·T for the parameters that a token is multiplied with, attention over all pairs, and scans of states."""
    attention = attention_flops_rule(
        n_layers=model.n_attention_layers,
        d_model=model.n_heads * (model.resolved_head_dim + model.resolved_v_head_dim) // 2,
        context_length=model.context_length,
        tokens=tokens,
    )
    states = _states(model)
    scans = 0 if states is None else scan_flops_rule(states, context_length=model.context_length, tokens=tokens)
    return training_flops_rule(multiplying_parameters_by_rule(model), tokens) + attention + scans


def cache_numbers_by_rule(model: ModelConfig, context_length: int) -> tuple[int, str]:
    """Numbers that a KV cache holds of a sequence, and the formula for those of a token."""
    shape = {"n_layers": model.n_kv_layers, "context_length": context_length, "bytes_per_number": 1}
    if model.kv_lora_rank is not None:
        widths = {"kv_lora_rank": model.kv_lora_rank, "qk_rope_head_dim": model.resolved_qk_rope_head_dim}
        return latent_cache_bytes_rule(**shape, **widths), "L·(rk + r)"
    widths = {"n_kv_heads": model.resolved_n_kv_heads, "head_dim": model.resolved_head_dim}
    return kv_cache_bytes_rule(**shape, **widths), "2·Lk·kv·c" if model.kv_sharing > 1 else "2·L·kv·c"


def state_bytes_by_rule(model: ModelConfig) -> int:
    """Bytes that layers with a state hold of a sequence in 16 bits, sums in fp32; 0 without such layers."""
    states = _states(model)
    return 0 if states is None else state_bytes_rule(states)


def parameters_formula(model: ModelConfig) -> str:
    """The closed form, for this model."""
    tables = "V·d" if model.tie_embeddings else "2·V·d"
    feed_forward = "3·d·ff" if model.gated else "2·d·ff"
    if model.n_experts:
        n_experts = model.n_experts + model.n_shared_experts
        feed_forward = f"{n_experts} experts of {feed_forward.replace('ff', 'e')}"
    attention = "2·d·c·(h + kv)"
    if model.kv_lora_rank is not None:
        queries = "d·h·(c + r)" if model.q_lora_rank is None else "rq·(d + h·(c + r))"
        attention = f"{queries} + d·(rk + r) + rk·h·(c + v) + h·v·d"
    layers = [f"L·({attention} + {feed_forward})"]
    if model.kv_sharing > 1:
        layers.append(f"-{model.n_attention_layers - model.n_kv_layers}·2·d·c·kv")
    if model.has_states:
        state = f"d·(2·w + u + {'2·' if 'gated_delta' in model.layer_mixers else ''}h) + k·u"
        own = state if model.feed_forward == "none" else f"{state} + {feed_forward}"
        layers = [f"Ls·({own})", *(layers if model.n_attention_layers else [])]
    return f"{' + '.join(layers)} + {tables}".replace("+ -", "- ")


def _layered(model: ModelConfig, n_experts: int) -> int:
    states = _states(model)
    return layered_parameters_rule(
        vocab_size=model.vocab_size,
        d_model=model.d_model,
        n_layers=model.n_layers,
        d_ff=model.resolved_d_ff,
        n_heads=model.n_heads,
        n_kv_heads=model.resolved_n_kv_heads,
        head_dim=model.resolved_head_dim,
        tied=model.tie_embeddings,
        gated=model.gated,
        n_experts=n_experts if model.n_experts else 0,
        n_routed=model.n_experts,
        d_expert=model.resolved_d_expert or 0,
        n_dense_layers=model.n_dense_layers,
        positions=_learned_positions(model),
        attention=_latent_attention(model),
        n_state_layers=model.n_layers - model.n_attention_layers,
        state_layer=0 if states is None else state_parameters_rule(states),
        n_sharing_layers=model.n_attention_layers - model.n_kv_layers,
    )


def _states(model: ModelConfig) -> StateSizes | None:
    if not model.has_states:
        return None
    return StateSizes(
        n_layers=model.n_layers - model.n_attention_layers,
        d_model=model.d_model,
        n_heads=model.resolved_state_heads,
        head_dim=model.state_head_dim,
        n_groups=model.state_groups,
        state_size=model.state_size,
        conv_width=model.conv_width,
        delta="gated_delta" in model.layer_mixers,
    )


def _latent_attention(model: ModelConfig) -> int | None:
    if model.kv_lora_rank is None:
        return None
    return latent_attention_parameters_rule(
        d_model=model.d_model,
        n_heads=model.n_heads,
        kv_lora_rank=model.kv_lora_rank,
        q_lora_rank=model.q_lora_rank,
        qk_nope_head_dim=model.resolved_qk_nope_head_dim,
        qk_rope_head_dim=model.resolved_qk_rope_head_dim,
        v_head_dim=model.resolved_v_head_dim,
    )


def _learned_positions(model: ModelConfig) -> int:
    return model.context_length if model.positions == "learned" else 0
