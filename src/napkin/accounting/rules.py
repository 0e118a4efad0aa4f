"""Napkin mathematics: closed forms that can be computed by hand, each with its source and its known error.

N is the number of parameters, T that of tokens; results are FLOPs, bytes or seconds. The errors given here were found
by comparing with `count`.

`rules_table` compares all of them for one model with the count of its step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from napkin.accounting.ledger import Ledger
from napkin.accounting.quantities import Unit
from napkin.accounting.state_rules import StateSizes, scan_flops_rule, state_bytes_rule, state_kept_bytes_rule
from napkin.optim.registry import optimizer_entry


def parameters_rule(*, vocab_size: int, d_model: int, n_layers: int, tied: bool) -> int:
    """Parameters of a Transformer: 12·L·d² for the blocks and V·d for each embedding table.

    Kaplan et al. 2020, "Scaling Laws for Neural Language Models", table 1 (which leaves the embedding out). For
    multi-head attention with a feed-forward layer of 4·d, or a gated one of 8/3·d, only norms, biases and learned
    positions are missing: 0.73% under for GPT-2 small. Grouped queries need fewer: 7.6% over for a Llama-like 125 M.
    """
    return 12 * n_layers * d_model**2 + (1 if tied else 2) * vocab_size * d_model


def gated_parameters_rule(
    *, vocab_size: int, d_model: int, n_layers: int, d_ff: int, n_heads: int, n_kv_heads: int, tied: bool
) -> int:
    """Parameters of a Llama-like Transformer: L·d·(2·d + 2·d·kv/h + 3·d_ff) and V·d for each embedding table.

    Touvron et al. 2023, "Llama 2", and Ainslie et al. 2023 for grouped queries. Only the norms are missing: 0.015%
    under at 125 M, 0.003% under at 13 B.
    """
    attention = 2 * d_model**2 + 2 * d_model * (d_model * n_kv_heads // n_heads)
    return n_layers * (attention + 3 * d_model * d_ff) + (1 if tied else 2) * vocab_size * d_model


def layered_parameters_rule(
    *,
    vocab_size: int,
    d_model: int,
    n_layers: int,
    d_ff: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    tied: bool,
    gated: bool = True,
    n_experts: int = 0,
    n_routed: int = 0,
    d_expert: int = 0,
    n_dense_layers: int = 0,
    positions: int = 0,
    attention: int | None = None,
    n_state_layers: int = 0,
    state_layer: int = 0,
    n_sharing_layers: int = 0,
) -> int:
    """Parameters of any model of attention and feed-forward layers, by what its layers are.

    V·d for each embedding table, p·d for p learned positions, and per layer 2·d·c·(h + kv) for heads of width c, and
    3·d·ff, or 2·d·ff without a gate. Where experts of width e take the place of a feed-forward layer, 3·d·e for each of
    them, and d for each that is routed to. With the experts that a token uses as `n_experts`, the result is the
    parameters that it uses. `attention` are the parameters of one attention layer of another kind, as
    `latent_attention_parameters_rule` says; `state_layer` are those of a layer that carries a state in its place, of
    which there are `n_state_layers`, as `state_parameters_rule` says. `n_sharing_layers` share the keys and values
    of an earlier one, and have 2·d·c·kv fewer.

    Touvron et al. 2023, "Llama 2"; Ainslie et al. 2023 for grouped queries; Dai et al. 2024, "DeepSeekMoE", for
    experts. Norms and biases are missing: 0.098% under for GPT-2 small, 0.015% under for a Llama-like 125 M.
    """
    attention = 2 * d_model * head_dim * (n_heads + n_kv_heads) if attention is None else attention
    matrices = 3 if gated else 2
    dense = n_dense_layers if n_experts else n_layers
    routed = (n_layers - dense) * d_model * (n_experts * matrices * d_expert + n_routed)
    tables = (1 if tied else 2) * vocab_size + positions
    mixers = (n_layers - n_state_layers) * attention + n_state_layers * state_layer
    mixers -= n_sharing_layers * 2 * d_model * head_dim * n_kv_heads
    return mixers + dense * matrices * d_model * d_ff + routed + tables * d_model


def latent_attention_parameters_rule(
    *,
    d_model: int,
    n_heads: int,
    kv_lora_rank: int,
    q_lora_rank: int | None,
    qk_nope_head_dim: int,
    qk_rope_head_dim: int,
    v_head_dim: int,
) -> int:
    """Parameters of a layer of multi-head latent attention: d·(rq + rk + r) + rq·h·(c + r) + rk·h·(c + v) + h·v·d.

    rk and rq are the widths of the latents of keys and of queries, c, r and v those of a key's two parts and of a
    value. Queries that are made of the residual stream have d·h·(c + r) in place of the terms with rq.

    DeepSeek-V2 2024, equations 9 to 19. Only the norms of the latents are missing: 0.001% under for DeepSeek-V3's.
    """
    queries = n_heads * (qk_nope_head_dim + qk_rope_head_dim)
    made = d_model * queries if q_lora_rank is None else q_lora_rank * (d_model + queries)
    latents = d_model * (kv_lora_rank + qk_rope_head_dim)
    return made + latents + kv_lora_rank * n_heads * (qk_nope_head_dim + v_head_dim) + n_heads * v_head_dim * d_model


def matmul_flops_rule(m: int, k: int, n: int) -> int:
    """FLOPs of [m, k] · [k, n]: 2·m·k·n, a multiplication and an addition for each triple.

    Exact if the first addition, to zero, is counted.
    """
    return 2 * m * k * n


def forward_flops_rule(parameters: float, tokens: float) -> float:
    """FLOPs of a forward pass: 2·N·T, one multiplication and one addition per parameter and token.

    Kaplan et al. 2020, section 2.1. Errors as for `training_flops_rule`.
    """
    return 2 * parameters * tokens


def backward_flops_rule(parameters: float, tokens: float) -> float:
    """FLOPs of a backward pass: 4·N·T, the gradients of both factors of each product.

    Kaplan et al. 2020, section 2.1. The first layer needs no gradient of its input: 33% over for a deep linear model of
    two layers.
    """
    return 4 * parameters * tokens


def training_flops_rule(parameters: float, tokens: float) -> float:
    """FLOPs to train on `tokens`: 6·N·T, of which 2·N·T are the forward pass.

    Kaplan et al. 2020, section 2.1. Leaves out attention's products of activations: 13% under for GPT-2 small at 1,024
    tokens, 68% under at 16,384. Counts an input gradient for the first layer too: 20% over for a deep linear model of
    two layers. Counts an untied input embedding, which is no matrix product: 5% over for a Llama-like 125 M.
    """
    return 6 * parameters * tokens


def attention_flops_rule(*, n_layers: int, d_model: float, context_length: int, tokens: float) -> float:
    """FLOPs that attention adds to 6·N·T: 12·L·d·context per token, over all pairs; causal pairs alone are half.

    Chowdhery et al. 2022, "PaLM", appendix B, where d = heads · head width; where values have another width than keys,
    the mean of both. Exact for attention alone; 6·N·T + this is
    0.6% over for GPT-2 small at 1,024 tokens, and 21% over for a Llama-like 125 M whose untied embedding N includes.
    """
    return 12 * n_layers * d_model * context_length * tokens


def adamw_bytes_rule(parameters: float, *, bytes_per_parameter: int = 16) -> float:
    """Bytes to train with AdamW in fp32: 16 per parameter (weight, gradient and two moments at 4 each).

    Rajbhandari et al. 2020, "ZeRO", section 3.1 (where mixed precision comes to 16 as 2 + 2 + 12). Leaves out
    activations: 27% under the true peak of a GPT-2-small step at batch 1, a small fraction of it for small models with
    large batches.
    """
    return bytes_per_parameter * parameters


def bytes_per_parameter(optimizer: str, *, mixed: bool = False) -> int:
    """Bytes per parameter for weight, gradient and the state of an optimizer, by its name in a recipe.

    In fp32, 4 for each: 8 for sgd, 12 with one moment (momentum, adagrad), 16 with two (adamw). `mixed` is the scheme
    of Rajbhandari et al. 2020, "ZeRO", section 3.1: weight and gradient in 2 bytes, an fp32 master copy, state in fp32.
    Autocast, which keeps fp32 weights and gradients, is not `mixed` in that sense. Errors as for `adamw_bytes_rule`.

    Raises NapkinError for an unknown optimizer.
    """
    return (2 + 2 + 4 if mixed else 4 + 4) + optimizer_entry(optimizer).state_bytes


def largest_model_rule(memory_bytes: float, *, bytes_per_parameter: int = 16) -> float:
    """Parameters that fill a memory, which may be that of several devices together.

    `adamw_bytes_rule` solved for N, with its errors: activations need memory too.
    """
    return memory_bytes / bytes_per_parameter


def activation_bytes_rule(
    *,
    batch_size: int,
    context_length: int,
    d_model: int,
    n_heads: int,
    form: Literal["plain", "flash", "checkpointed"] = "flash",
) -> int:
    """Bytes that one GPT block keeps for its backward pass, in 16 bits: s·b·h·(34 + 5·a·s/h).

    Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equations 2 and 6: flash
    attention, which stores no scores, keeps 34·s·b·h; checkpointing the block's input keeps 2·s·b·h, which is exact.
    Dropout's masks are 2 of the 34 and 1 of the 5: 6% over for a block of GPT-2 XL without dropout, 12% over with plain
    attention.
    """
    one = context_length * batch_size * d_model
    scores = 5 * n_heads * context_length**2 * batch_size
    return {"plain": 34 * one + scores, "flash": 34 * one, "checkpointed": 2 * one}[form]


def compute_optimal_tokens_rule(parameters: float) -> float:
    """Tokens to train N parameters on for the lowest loss with a given budget of FLOPs: 20·N.

    Hoffmann et al. 2022, "Chinchilla", table 3, rounded: 1% under their figure at 1 B parameters, 11% under at 67 B.
    A step does not show it, and models that are used a lot are trained on many times more.
    """
    return 20 * parameters


def seconds_rule(flops: float, peak_flops_per_second: float, *, mfu: float = 0.5) -> float:
    """Seconds to compute `flops` on devices of that dense peak at a model-FLOPs utilisation.

    Chowdhery et al. 2022, "PaLM", appendix B, solved for time. An MFU of 0.5 is good on a cluster; small models on a
    CPU reach less.
    """
    return flops / (peak_flops_per_second * mfu)


def all_reduce_seconds_rule(message_bytes: float, n_devices: int, link_bytes_per_second: float) -> float:
    """Seconds until n devices in a ring have the sum of what each holds: 2·(n-1)/n of it over each link, one way.

    Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms". A lower bound: no link reaches its nominal rate.
    """
    return 2 * (n_devices - 1) / n_devices * message_bytes / link_bytes_per_second


def kv_cache_bytes_rule(
    *, n_layers: int, n_kv_heads: int, head_dim: int, context_length: int, bytes_per_number: int = 2
) -> int:
    """Bytes of the keys and values that are kept while a sequence is generated: 2·L·kv·c·s numbers.

    Pope et al. 2022, "Efficiently Scaling Transformer Inference", section 3.3. Exact for a cache of that length.
    """
    return 2 * n_layers * n_kv_heads * head_dim * context_length * bytes_per_number


def latent_cache_bytes_rule(
    *, n_layers: int, kv_lora_rank: int, qk_rope_head_dim: int, context_length: int, bytes_per_number: int = 2
) -> int:
    """Bytes of the latents and rotated keys that latent attention keeps of a sequence: L·(rk + r)·s numbers.

    DeepSeek-V2 2024, section 2.1.4. Exact for a cache of that length.
    """
    return n_layers * (kv_lora_rank + qk_rope_head_dim) * context_length * bytes_per_number


def decode_seconds_rule(
    parameter_bytes: float, kv_cache_bytes: float, bytes_per_second: float, *, batch_size: int = 1
) -> float:
    """Seconds to generate one token for each of `batch_size` sequences: all bytes are read once.

    Pope et al. 2022, section 2.1. Throughput is batch_size over this. A lower bound: no memory reaches its full
    bandwidth, and beyond a few hundred sequences decoding is bound by arithmetic.
    """
    return (parameter_bytes + batch_size * kv_cache_bytes) / bytes_per_second


def matmul_intensity_rule(m: int, k: int, n: int, *, bytes_per_number: int = 2) -> float:
    """FLOPs per byte moved of [m, k] · [k, n]; in 16 bits about m if m is small compared with k and n.

    Williams et al. 2009, "Roofline". Below its peak over its bandwidth a device is bound by bytes: 295 for an H100 in
    bf16. Exact if each number is read or written once.
    """
    return 2 * m * k * n / (bytes_per_number * (m * k + k * n + m * n))


def norm_flops_rule(*, n_layers: int, d_model: int, tokens: float) -> float:
    """FLOPs of the norms of a step: two in each layer and the last one, 4 per number forward (square, sum, two
    products), and twice that backward. Most of the work of a norm is reading and writing."""
    return (2 * n_layers + 1) * 12 * d_model * tokens


def norm_bytes_rule(*, n_layers: int, d_model: int, tokens: float, bytes_per_number: int = 2) -> float:
    """Bytes that these norms move where each is one kernel: forward reads and writes each number, backward reads input
    and gradient and writes one. As single operators they move several times that: a quarter of the seconds of BERT's
    training were such normalisations, at 0.2% of its FLOPs (Ivanov et al. 2021)."""
    return (2 * n_layers + 1) * 5 * bytes_per_number * d_model * tokens


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
    """True if input embedding and output head are one matrix."""
    gated: bool = True
    """True if the feed-forward layer has a third matrix, a gate."""
    head_dim: int | None = None
    """Width of a head; None is d_model / n_heads."""
    value_dim: int | None = None
    """Width of a value; None is that of a head."""
    latent_cache: tuple[int, int] | None = None
    """Numbers of the latent and of the rotated key that latent attention keeps of a token; None is ordinary
    attention."""
    states: StateSizes | None = None
    """The layers that carry a state in place of attention; None is none."""
    by_layers: int | None = None
    """All parameters by the closed form of the architecture's layers; None where only the sizes above are known."""
    formula: str = ""
    """The closed form, written out."""
    multiplying: int | None = None
    """The parameters that multiply a token, by the same closed form."""
    n_kv_layers: int | None = None
    """Layers that keep keys and values in a cache; None is all with attention."""
    batch_size: int
    """Sequences in memory at a time: those of a micro-batch, if gradients are accumulated."""
    sequences: int
    """Sequences per step, all micro-batches together."""
    context_length: int

    @property
    def width_of_pairs(self) -> int:
        """Numbers of all heads that a query and a key are multiplied in: the mean of keys and values."""
        width = self.head_dim or self.d_model // self.n_heads
        return self.n_heads * (width + (self.value_dim or width)) // 2

    @property
    def n_attention_layers(self) -> int:
        """Layers without a state."""
        return self.n_layers - (0 if self.states is None else self.states.n_layers)

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
    """The meaning of the figures, where that is not obvious."""

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


def parameter_rows(
    *, vocab_size: int, d_model: int, n_layers: int, tied: bool, gated: tuple[int, int, int] | None
) -> Iterator[RuleRow]:
    """Parameters by size; `gated` are d_ff, n_heads and n_kv_heads of a model whose feed-forward layer has a gate."""
    rule = parameters_rule(vocab_size=vocab_size, d_model=d_model, n_layers=n_layers, tied=tied)
    yield RuleRow("parameters", "12·L·d² + V·d", "count", rule)
    if gated is not None:
        d_ff, n_heads, n_kv_heads = gated
        rule = gated_parameters_rule(
            vocab_size=vocab_size,
            d_model=d_model,
            n_layers=n_layers,
            d_ff=d_ff,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            tied=tied,
        )
        yield RuleRow("parameters, gated", "L·d·(2·d + 2·d·kv/h + 3·ff) + V·d", "count", rule)


def step_flops_rows(parameters: float, tokens: float) -> list[RuleRow]:
    """FLOPs of a step of T tokens: forward, backward and both."""
    return [
        RuleRow("FLOPs, forward", "2·N·T", "FLOP", forward_flops_rule(parameters, tokens), note="T of a step"),
        RuleRow("FLOPs, backward", "4·N·T", "FLOP", backward_flops_rule(parameters, tokens)),
        RuleRow("FLOPs, training", "6·N·T", "FLOP", training_flops_rule(parameters, tokens)),
    ]


def attention_row(*, n_layers: int, d_model: int, context_length: int, tokens: float) -> RuleRow:
    """FLOPs that attention adds to those of a step."""
    rule = attention_flops_rule(n_layers=n_layers, d_model=d_model, context_length=context_length, tokens=tokens)
    return RuleRow("FLOPs, attention", "12·L·d·s·T", "FLOP", rule, note="over all pairs")


AttentionForm = Literal["plain", "flash", "checkpointed"]
_ACTIVATIONS: dict[AttentionForm, str] = {
    "plain": "s·b·d·(34 + 5·h·s/d)",
    "flash": "34·s·b·d",
    "checkpointed": "2·s·b·d",
}


def activation_rows(
    *, batch_size: int, context_length: int, d_model: int, n_heads: int
) -> Iterator[tuple[AttentionForm, RuleRow]]:
    """Bytes that a block keeps, by the form of its attention."""
    for form, formula in _ACTIVATIONS.items():
        rule = activation_bytes_rule(
            batch_size=batch_size, context_length=context_length, d_model=d_model, n_heads=n_heads, form=form
        )
        note = "rule: in 16 bits, with dropout"
        yield form, RuleRow(f"activations per layer, {form}", formula, "bytes", rule, note=note)


def _parameters(ledger: Ledger, sizes: Sizes) -> Iterator[RuleRow]:
    counted = ledger.parameters
    shape = {name: getattr(sizes, name) for name in ("vocab_size", "d_model", "n_layers", "tied")}
    gated = (sizes.d_ff, sizes.n_heads, sizes.n_kv_heads) if sizes.gated else None
    yield from (replace(row, count=counted) for row in parameter_rows(**shape, gated=gated))
    if sizes.by_layers is not None:
        yield RuleRow("parameters, by layer", sizes.formula, "count", sizes.by_layers, counted, "no norms, no biases")


def _flops(ledger: Ledger, sizes: Sizes) -> Iterator[RuleRow]:
    tokens = sizes.tokens
    rows = step_flops_rows(ledger.parameters, tokens)
    counts = (ledger.forward_flops, ledger.backward_flops, ledger.flops)
    yield from (replace(row, count=count) for row, count in zip(rows, counts, strict=True))
    row = attention_row(
        n_layers=sizes.n_attention_layers,
        d_model=sizes.width_of_pairs,
        context_length=sizes.context_length,
        tokens=tokens,
    )
    whole, attention = rows[-1].rule, row.rule
    # The layers of a mixer are modules of their own: what is left is its scan.
    scans = [each for each in ledger.rows if each.module.endswith(".mixer") and each.phase != "recompute"]
    if sizes.n_attention_layers:
        of_pairs = ledger.attention_flops - sum(each.flops for each in scans if each.of_activations)
        yield replace(row, count=of_pairs or None)
        yield RuleRow("FLOPs, with attention", "6·N·T + 12·L·d·s·T", "FLOP", whole + attention, ledger.flops)
    if sizes.states is not None:
        scan = scan_flops_rule(sizes.states, context_length=sizes.context_length, tokens=tokens)
        formula = "2·L·T·(8·Q·h·n + 5·Q·w + 9·n·w)" if sizes.states.delta else "2·L·T·(4·Q·g·n + 3·Q·w + 7·n·w)"
        yield RuleRow("FLOPs, scans of states", formula, "FLOP", scan, sum(each.flops for each in scans))
        attention += scan
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
    shape = {name: getattr(sizes, name) for name in ("batch_size", "context_length", "d_model", "n_heads")}
    if sizes.states is not None:
        tokens = sizes.batch_size * sizes.context_length
        rule = state_kept_bytes_rule(sizes.states, context_length=sizes.context_length, tokens=tokens)
        of_states = 0 if ran == "checkpointed" else _kept_by_a_state(ledger) / micro_batches
        formula = "4·T·(d + 6·w + 3·u + 4·h + n·w/Q)"
        if not sizes.states.delta:
            yield RuleRow("activations per layer, states", formula, "bytes", rule, of_states or None, "rule: in fp32")
    if not sizes.n_attention_layers:
        return
    for form, row in activation_rows(**shape):
        yield replace(row, count=(kept / micro_batches or None) if form == ran else None)


def _kept_by_a_state(ledger: Ledger) -> int:
    """Bytes that the first layer with a state and its norm keep."""
    kept = [(row.module.split(".mixer")[0], row.bytes_kept) for row in ledger.rows if ".mixer" in row.module]
    return sum(own for block, own in kept if block == kept[0][0])


def _form_of_attention(ledger: Ledger) -> AttentionForm:
    if any(row.phase == "recompute" for row in ledger.rows):
        return "checkpointed"
    # A fused kernel holds no scores.
    return "flash" if any("scaled_dot_product" in row.operator for row in ledger.rows) else "plain"


def _use(ledger: Ledger, sizes: Sizes, bytes_per_second: float | None, batch_size: int) -> Iterator[RuleRow]:
    cache, formula = _cache_of(sizes)
    if sizes.n_attention_layers:
        yield RuleRow("KV cache of a sequence", formula, "bytes", cache, note="generating, in 16 bits")
    if sizes.states is not None:
        states = state_bytes_rule(sizes.states)
        note = "generating, in 16 bits, sums in fp32"
        yield RuleRow("states of a sequence", "L·(4·n·w + 2·(k-1)·u)", "bytes", states, note=note)
        cache += states
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


def _cache_of(sizes: Sizes) -> tuple[int, str]:
    """Bytes of a sequence's cache in 16 bits, and their formula."""
    shape = {"n_layers": sizes.n_attention_layers, "context_length": sizes.context_length}
    if sizes.latent_cache is not None:
        latent, rotated = sizes.latent_cache
        return latent_cache_bytes_rule(**shape, kv_lora_rank=latent, qk_rope_head_dim=rotated), "L·(rk + r)·s·2"
    head_dim = sizes.head_dim or sizes.d_model // sizes.n_heads
    if sizes.n_kv_layers is not None:
        shape["n_layers"] = sizes.n_kv_layers
    formula = "2·L·kv·c·s·2" if shape["n_layers"] == sizes.n_attention_layers else "2·Lk·kv·c·s·2"
    return kv_cache_bytes_rule(**shape, n_kv_heads=sizes.n_kv_heads, head_dim=head_dim), formula


def _intensity(contraction: tuple[int, int, int, int] | None, flops: int, moved: int) -> RuleRow:
    assert contraction is not None
    _, m, n, k = contraction
    bytes_per_number = moved / (m * k + k * n + m * n)
    width = 2 if bytes_per_number < 3 else 4
    rule = matmul_intensity_rule(m, k, n, bytes_per_number=width)
    note = f"of the largest product, [{m}, {k}]·[{k}, {n}] in {8 * width} bits"
    return RuleRow("arithmetic intensity", "2·m·k·n / bytes", "FLOP/byte", rule, flops / moved, note)
