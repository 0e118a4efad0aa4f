"""The rules of thumb for sizes that are given on the command line, without a recipe and without a count."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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
    training_flops_rule,
)
from napkin.cli.terminal import print_table, say
from napkin.errors import NapkinError
from napkin.hardware.device import Device
from napkin.recipe.training_config import OptimizerName
from napkin.units import format_count


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
