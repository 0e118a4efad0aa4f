"""The rules of thumb for sizes that are given, and for those of a recipe: parameters, FLOPs, bytes and seconds."""

from collections.abc import Iterator
from dataclasses import dataclass

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
    layered_parameters_rule,
    matmul_flops_rule,
    matmul_intensity_rule,
    parameter_rows,
    step_flops_rows,
    training_flops_rule,
)
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.planning.rules.by_rule import RuleDevices
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import OptimizerName


@dataclass(frozen=True)
class RuleSizes:
    """Sizes for the rules of thumb; a rule without its sizes is left out."""

    batch_size: int = 1
    """Sequences of a step, and sequences that are generated at a time."""
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

    `active` are the parameters that a token is computed with: None is all, as of any model but a mixture of experts.
    Raises NapkinError for a size that is not above 0.
    """
    for name, value in vars(sizes).items():
        if isinstance(value, int) and value < 1:
            raise NapkinError(f"--{name.replace('_', '-')} is {value}: use a number above 0")
    heads, width = sizes.n_heads, sizes.d_model
    if heads and width and width % heads:
        raise NapkinError(f"--d-model {width} does not divide among --n-heads {heads}")
    return [
        *_of_a_step(active or parameters, sizes),
        *_of_training_bytes(parameters, sizes, devices),
        *_of_generating(parameters, sizes, devices),
    ]


def _of_a_step(active: float, sizes: RuleSizes) -> Iterator[RuleRow]:
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


def _of_training_bytes(parameters: float, sizes: RuleSizes, devices: RuleDevices | None) -> Iterator[RuleRow]:
    each = bytes_per_parameter(sizes.optimizer)
    state = adamw_bytes_rule(parameters, bytes_per_parameter=each)
    yield RuleRow(f"bytes, {sizes.optimizer}", f"{each}·N", "bytes", state)
    if devices is not None:
        memory = devices.n * devices.device.advertised_bytes
        largest = largest_model_rule(memory, bytes_per_parameter=each)
        yield RuleRow("largest model", f"memory / {each}", "count", largest)
    if sizes.d_model and sizes.n_heads:
        for _, row in activation_rows(
            batch_size=sizes.batch_size,
            context_length=sizes.context_length,
            d_model=sizes.d_model,
            n_heads=sizes.n_heads,
        ):
            yield row
    link = devices and (devices.device.link_bandwidth or devices.device.host_bandwidth)
    if devices is not None and link and devices.n > 1:
        seconds = all_reduce_seconds_rule(4 * parameters, devices.n, link)
        yield RuleRow("all-reduce of gradients", "2·(n-1)/n · 4·N / link", "seconds", seconds)


def _of_generating(parameters: float, sizes: RuleSizes, devices: RuleDevices | None) -> Iterator[RuleRow]:
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
    """6·N·T for the parameters that a token is multiplied with, and attention over all pairs."""
    attention = attention_flops_rule(
        n_layers=model.n_layers,
        d_model=model.n_heads * model.resolved_head_dim,
        context_length=model.context_length,
        tokens=tokens,
    )
    return training_flops_rule(multiplying_parameters_by_rule(model), tokens) + attention


def parameters_formula(model: ModelConfig) -> str:
    """The closed form, for this model."""
    tables = "V·d" if model.tie_embeddings else "2·V·d"
    feed_forward = "3·d·ff" if model.gated else "2·d·ff"
    if model.n_experts:
        n_experts = model.n_experts + model.n_shared_experts
        feed_forward = f"{n_experts} experts of {feed_forward.replace('ff', 'e')}"
    return f"L·(2·d·c·(h + kv) + {feed_forward}) + {tables}"


def _layered(model: ModelConfig, n_experts: int) -> int:
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
    )


def _learned_positions(model: ModelConfig) -> int:
    return model.context_length if model.positions == "learned" else 0
