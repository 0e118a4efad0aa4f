"""All rules of thumb for one model and its step, compared with the count of that step: rule, count, error."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from napkin.accounting.ledger import Ledger
from napkin.accounting.quantity_row import Unit
from napkin.accounting.rules import (
    activation_bytes_rule,
    adamw_bytes_rule,
    attention_flops_rule,
    backward_flops_rule,
    compute_optimal_tokens_rule,
    decode_seconds_rule,
    forward_flops_rule,
    gated_parameters_rule,
    kv_cache_bytes_rule,
    largest_model_rule,
    matmul_intensity_rule,
    parameters_rule,
    seconds_rule,
    training_flops_rule,
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a Transformer and of the batch that its step trains on."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    tied: bool
    """Whether input embedding and output head are one matrix."""
    gated: bool = True
    """Whether the feed-forward layer has a third matrix, a gate."""
    head_dim: int | None = None
    """Width of a head; None is d_model / n_heads."""
    by_layers: int | None = None
    """All parameters by the closed form of the architecture's layers; None where only the sizes above are known."""
    formula: str = ""
    """The closed form, written out."""
    multiplying: int | None = None
    """The parameters that a token is multiplied with, by the same closed form."""
    batch_size: int
    """Sequences in memory at a time: those of a micro-batch, if gradients are accumulated."""
    sequences: int
    """Sequences per step, all micro-batches together."""
    context_length: int

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.sequences * self.context_length


@dataclass(frozen=True)
class RuleRow:
    """A quantity by one rule and by the count."""

    quantity: str
    formula: str
    unit: Unit
    rule: float
    count: float | None = None
    """None if a training step does not show the quantity."""
    note: str = ""
    """What the figures refer to, where that is not obvious."""

    @property
    def error(self) -> float | None:
        """The rule over the count, minus one: 0.5 is 50% over; None if there is no count.

        >>> RuleRow("FLOPs", "6·N·T", "FLOP", 150, 100).error
        0.5
        """
        return self.rule / self.count - 1 if self.count else None


def rules_table(
    ledger: Ledger,
    sizes: Sizes,
    *,
    block: str = "blocks.0",
    memory_bytes: float | None = None,
    flops_per_second: float | None = None,
    bytes_per_second: float | None = None,
    training_tokens: float | None = None,
    mfu: float = 0.5,
    decode_batch_size: int = 64,
) -> list[RuleRow]:
    """The rules that apply, in the order in which a plan is made: parameters, FLOPs, bytes, time, use.

    Args:
        ledger: of one step of the model.
        sizes: of the model and its batch.
        block: module path of one block, whose kept bytes are compared with the activations rule.
        memory_bytes: of all devices; without it, there is no row for the largest model.
        flops_per_second: dense peak of all devices; without it or `training_tokens`, there is no row for the time.
        bytes_per_second: memory bandwidth of one device; without it, there are no rows for decoding.
        training_tokens: tokens that the whole run trains on.
        mfu: model-FLOPs utilisation to assume.
        decode_batch_size: sequences that are generated at a time.

    Rules use the counted number of parameters as N, so that the error of each is its own.
    """
    rows = [*_parameters(ledger, sizes), *_flops(ledger, sizes), *_bytes(ledger, sizes, block)]
    if memory_bytes is not None:
        bytes_per_parameter = ledger.peak_bytes / ledger.parameters
        note = f"count: at this step's {bytes_per_parameter:.1f} bytes per parameter"
        largest = largest_model_rule(memory_bytes)
        rows.append(RuleRow("largest model", "M / 16", "count", largest, memory_bytes / bytes_per_parameter, note))
    rows.append(
        RuleRow(
            "tokens to train on",
            "20·N",
            "count",
            compute_optimal_tokens_rule(ledger.parameters),
            training_tokens,
            "count: of the run" if training_tokens else "compute-optimal",
        )
    )
    if flops_per_second is not None and training_tokens is not None:
        by_rule = training_flops_rule(ledger.parameters, training_tokens)
        by_count = ledger.flops * training_tokens / sizes.tokens
        seconds, counted = (seconds_rule(flops, flops_per_second, mfu=mfu) for flops in (by_rule, by_count))
        rows.append(RuleRow("time of the run", "6·N·T / (peak·MFU)", "seconds", seconds, counted, f"both at MFU {mfu}"))
    return rows + list(_use(ledger, sizes, bytes_per_second, decode_batch_size))


def _parameters(ledger: Ledger, sizes: Sizes) -> Iterator[RuleRow]:
    shape = {name: getattr(sizes, name) for name in ("vocab_size", "d_model", "n_layers", "tied")}
    counted = ledger.parameters
    yield RuleRow("parameters", "12·L·d² + V·d", "count", parameters_rule(**shape), counted)
    if sizes.gated:
        heads = {name: getattr(sizes, name) for name in ("d_ff", "n_heads", "n_kv_heads")}
        gated = gated_parameters_rule(**shape, **heads)
        yield RuleRow("parameters, gated", "L·d·(2·d + 2·d·kv/h + 3·ff) + V·d", "count", gated, counted)
    if sizes.by_layers is not None:
        yield RuleRow("parameters, by layer", sizes.formula, "count", sizes.by_layers, counted, "no norms, no biases")


def _flops(ledger: Ledger, sizes: Sizes) -> Iterator[RuleRow]:
    parameters, tokens = ledger.parameters, sizes.tokens
    yield RuleRow(
        "FLOPs, forward", "2·N·T", "FLOP", forward_flops_rule(parameters, tokens), ledger.forward_flops, "T of a step"
    )
    backward = backward_flops_rule(parameters, tokens)
    yield RuleRow("FLOPs, backward", "4·N·T", "FLOP", backward, ledger.backward_flops)
    whole = training_flops_rule(parameters, tokens)
    yield RuleRow("FLOPs, training", "6·N·T", "FLOP", whole, ledger.flops)
    attention = attention_flops_rule(
        n_layers=sizes.n_layers,
        d_model=sizes.n_heads * (sizes.head_dim or sizes.d_model // sizes.n_heads),
        context_length=sizes.context_length,
        tokens=tokens,
    )
    counted = ledger.attention_flops or None
    yield RuleRow("FLOPs, attention", "12·L·d·s·T", "FLOP", attention, counted, "over all pairs")
    yield RuleRow("FLOPs, with attention", "6·N·T + 12·L·d·s·T", "FLOP", whole + attention, ledger.flops)
    if sizes.multiplying is not None:
        used = training_flops_rule(sizes.multiplying, tokens) + attention
        note = "N: what a token is multiplied with, of experts those that it uses, and no table that is looked up"
        yield RuleRow("FLOPs, by layer", "6·N·T + 12·L·h·c·s·T", "FLOP", used, ledger.flops, note)


def _bytes(ledger: Ledger, sizes: Sizes, block: str) -> Iterator[RuleRow]:
    yield RuleRow(
        "peak bytes, AdamW", "16·N", "bytes", adamw_bytes_rule(ledger.parameters), ledger.peak_bytes, "no activations"
    )
    kept = sum(row.bytes_kept for row in ledger.rows if f"{row.module}.".startswith(f"{block}."))
    micro_batches = sizes.sequences // sizes.batch_size
    ran = _form_of_attention(ledger)
    formulas: dict[Literal["plain", "flash", "checkpointed"], str] = {
        "plain": "s·b·d·(34 + 5·h·s/d)",
        "flash": "34·s·b·d",
        "checkpointed": "2·s·b·d",
    }
    for form, formula in formulas.items():
        rule = activation_bytes_rule(
            batch_size=sizes.batch_size,
            context_length=sizes.context_length,
            d_model=sizes.d_model,
            n_heads=sizes.n_heads,
            form=form,
        )
        counted = kept / micro_batches if form == ran else None
        note = "rule: in 16 bits, with dropout"
        yield RuleRow(f"activations per layer, {form}", formula, "bytes", rule, counted or None, note)


def _form_of_attention(ledger: Ledger) -> Literal["plain", "flash", "checkpointed"]:
    if any(row.phase == "recompute" for row in ledger.rows):
        return "checkpointed"
    # A fused kernel holds no scores.
    return "flash" if any("scaled_dot_product" in row.operator for row in ledger.rows) else "plain"


def _use(ledger: Ledger, sizes: Sizes, bytes_per_second: float | None, batch_size: int) -> Iterator[RuleRow]:
    cache = kv_cache_bytes_rule(
        n_layers=sizes.n_layers,
        n_kv_heads=sizes.n_kv_heads,
        head_dim=sizes.head_dim or sizes.d_model // sizes.n_heads,
        context_length=sizes.context_length,
    )
    yield RuleRow("KV cache of a sequence", "2·L·kv·c·s·2", "bytes", cache, note="generating, in 16 bits")
    if bytes_per_second is not None:
        weights = 2 * ledger.parameters
        one = decode_seconds_rule(weights, cache, bytes_per_second)
        yield RuleRow("latency of a token", "(2·N + KV) / B", "seconds", one, note="one sequence, in 16 bits")
        many = decode_seconds_rule(weights, cache, bytes_per_second, batch_size=batch_size)
        formula = f"{batch_size} / ((2·N + {batch_size}·KV) / B)"
        note = f"{batch_size} sequences, in 16 bits"
        yield RuleRow("throughput", formula, "tokens/s", batch_size / many, note=note)
    products = [row for row in ledger.rows if row.contraction is not None and not row.of_activations]
    if products:
        largest = max(products, key=lambda row: row.flops)
        yield _intensity(largest.contraction, largest.flops, largest.bytes_read + largest.bytes_written)


def _intensity(contraction: tuple[int, int, int, int] | None, flops: int, moved: int) -> RuleRow:
    assert contraction is not None
    _, m, n, k = contraction
    bytes_per_number = moved / (m * k + k * n + m * n)
    width = 2 if bytes_per_number < 3 else 4
    rule = matmul_intensity_rule(m, k, n, bytes_per_number=width)
    note = f"of the largest product, [{m}, {k}]·[{k}, {n}] in {8 * width} bits"
    return RuleRow("arithmetic intensity", "2·m·k·n / bytes", "FLOP/byte", rule, flops / moved, note)
