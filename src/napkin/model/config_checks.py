"""Checks of a model's config: values that are impossible, or that do not fit the others, each with a way out.

`napkin.model.config` runs them for each new config. Nothing here imports torch.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast, get_args

from napkin.errors import NapkinError, suggestion

TokenMixer = Literal["attention", "mamba2", "gated_delta"]
TOKEN_MIXERS: tuple[TokenMixer, ...] = get_args(TokenMixer)

WIDEST_FLASH_HEAD = 256
"""`napkin.kernels.attention.flash` holds a block of whole heads in registers."""

_MAY_BE_ZERO = frozenset(
    "vocab_size dropout n_experts n_shared_experts n_dense_layers balance_weight router_z_weight z_weight".split()
)
_OF_LATENTS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_NOT_OF_LATENTS = {
    "head_dim": "whose heads are qk_nope_head_dim + qk_rope_head_dim wide",
    "mup_base_d_model": "whose layers have no multipliers",
}


def problems_of(config: Any) -> Iterator[str]:
    """Values that are impossible or do not fit the others; each may rest on those before it being none."""
    yield from _problems_of_numbers(config)
    yield from _problems_of_heads(config)
    yield from _problems_of_latents(config)
    yield from _problems_of_positions(config)
    yield from _problems_of_attention(config)
    yield from _problems_of_mixers(config)
    yield from _problems_of_sharing(config)
    yield from _problems_of_experts(config)


def _problems_of_numbers(config: Any) -> Iterator[str]:
    for name, value in vars(config).items():
        if value is None or isinstance(value, (bool, str)):
            continue
        if name in _MAY_BE_ZERO:
            # A negated comparison catches NaN too.
            if not value >= 0:
                yield f"{name} is {value}: use 0 or more"
        elif not value > 0:
            yield f"{name} is {value}: use a number above 0"
        if value == math.inf:
            yield f"{name} is infinite: use a finite number"
    if config.dropout >= 1:
        yield f"dropout is {config.dropout}: use less than 1, or nothing is left"


def _problems_of_heads(config: Any) -> Iterator[str]:
    width = "head_dim" if config.kv_lora_rank is None else "qk_nope_head_dim"
    if getattr(config, width) is None and config.d_model % config.n_heads:
        yield (
            f"d_model {config.d_model} does not divide into n_heads {config.n_heads}: use d_model "
            f"{round_up(config.d_model, config.n_heads)}, another n_heads, or set {width}"
        )
    if config.n_heads % config.resolved_n_kv_heads:
        yield (
            f"n_heads {config.n_heads} does not divide into n_kv_heads {config.resolved_n_kv_heads} groups: use "
            f"a divisor of {config.n_heads}"
        )


def _problems_of_latents(config: Any) -> Iterator[str]:
    """Values that latent attention does not go with, or that only it has."""
    if config.kv_lora_rank is None:
        for name in _OF_LATENTS:
            if getattr(config, name) is not None:
                yield f"{name} is {getattr(config, name)} and there is no latent attention: set kv_lora_rank too"
        return
    of = f"kv_lora_rank is {config.kv_lora_rank}, of latent attention"
    for name, why in _NOT_OF_LATENTS.items():
        if getattr(config, name) is not None:
            yield f"{name} is {getattr(config, name)} and {of}, {why}: leave {name} out"
    if config.resolved_n_kv_heads != config.n_heads:
        yield f"n_kv_heads is {config.n_kv_heads} and {of}, which makes a key for each query head: leave n_kv_heads out"
    if config.qk_norm != "none":
        yield f"qk_norm is '{config.qk_norm}' and {of}, which norms its latents instead: use qk_norm 'none'"
    if config.biases != "none":
        yield f"biases is '{config.biases}' and {of}, which has none: use biases 'none'"
    if config.positions == "rope" and config.resolved_qk_rope_head_dim % 2:
        yield (
            f"qk_rope_head_dim is {config.qk_rope_head_dim}, rotary positions need an even number: use "
            f"{config.resolved_qk_rope_head_dim + 1}"
        )


def _problems_of_positions(config: Any) -> Iterator[str]:
    if config.positions == "rope" and config.kv_lora_rank is None and config.resolved_head_dim % 2:
        yield (
            f"d_model {config.d_model} over n_heads {config.n_heads} makes heads of {config.resolved_head_dim}, rotary "
            f"positions need an even number: use d_model {config.n_heads * (config.resolved_head_dim + 1)}"
            if config.head_dim is None
            else f"head_dim is {config.head_dim}, rotary positions need an even number: use {config.head_dim + 1}"
        )
    if config.positions == "sinusoidal" and config.d_model % 2:
        yield f"d_model is {config.d_model}, sinusoidal positions need an even number: use {config.d_model + 1}"
    if config.rope_scaling != "none" and config.positions != "rope":
        yield (
            f"rope_scaling is '{config.rope_scaling}' and positions are '{config.positions}': use positions 'rope', or "
            "rope_scaling 'none'"
        )
    if config.rope_factor < 1:
        yield f"rope_factor is {config.rope_factor}: use 1 or more, the context can only grow"
    if (config.rope_scaling == "none") != (config.rope_factor == 1):
        yield (
            f"rope_scaling is '{config.rope_scaling}' and rope_factor is {config.rope_factor}: use a scaling with a "
            "factor above 1, or 'none' with 1"
        )
    if config.rope_scaling == "none" and config.rope_original_context is not None:
        yield (
            f"rope_original_context is {config.rope_original_context} and rope_scaling is 'none': set rope_scaling "
            "too, or leave it out"
        )
    if config.rope_scaling == "ntk" and config.resolved_qk_rope_head_dim == 2:
        yield "rope_scaling is 'ntk' and heads are 2 wide: their one wavelength cannot be scaled, use 'linear'"


def _problems_of_attention(config: Any) -> Iterator[str]:
    if config.attention_softcap is not None and config.attention == "sdpa":
        yield (
            f"attention_softcap is {config.attention_softcap}, which attention 'sdpa' does not support: use "
            "attention 'plain', 'flex', 'flash' or 'compiled'"
        )
    if config.attention in ("flash", "compiled") and config.positions == "alibi":
        yield f"positions is 'alibi', whose biases attention '{config.attention}' does not add: use attention 'flex'"
    if config.attention == "flash" and config.resolved_head_dim > WIDEST_FLASH_HEAD:
        yield (
            f"attention is 'flash' and heads are {config.resolved_head_dim} wide, the limit is {WIDEST_FLASH_HEAD}: "
            "use more heads, or attention 'sdpa'"
        )
    every = config.full_attention_every
    if every is not None and config.attention_window is None:
        yield f"full_attention_every is {every} and there is no window: set attention_window too, or leave it out"
    if every == 1:
        yield "full_attention_every is 1, which leaves no block a window: leave attention_window out"

    if config.norm == "none" and config.qk_norm != "none":
        yield (
            f"qk_norm is '{config.qk_norm}' and norm is 'none', which says how queries and keys are normed too: use "
            "norm 'rms' or 'layer', or qk_norm 'none'"
        )


def _problems_of_mixers(config: Any) -> Iterator[str]:
    pattern = mixer_pattern(config.mixers)
    stateful = [mixer for mixer in pattern if mixer != "attention"]
    if config.feed_forward == "none":
        if len(stateful) < len(pattern):
            yield (
                f"feed_forward is 'none' and mixers are '{config.mixers}': only layers with a state do without, use "
                "mixers 'mamba2', or a feed-forward layer"
            )
        if config.n_experts or config.d_ff is not None:
            yield "feed_forward is 'none', and n_experts or d_ff is set: leave them out, or choose a feed-forward layer"
    if not stateful:
        return
    if len(set(stateful)) > 1:
        yield (
            f"mixers '{config.mixers}' names {' and '.join(dict.fromkeys(stateful))}, whose sizes are the same fields: "
            "use one of them, with attention"
        )
    if config.block != "pre":
        yield f"block is '{config.block}', layers with a state are in blocks of the kind 'pre': use that"
    if config.norm == "none":
        yield "norm is 'none', and layers with a state have a norm: use norm 'rms' or 'layer'"
    if config.mup_base_d_model is not None:
        yield "mup_base_d_model and a layer with a state: it has no multipliers, use one or the other"
    if config.state_heads is None and 2 * config.d_model % config.state_head_dim:
        yield (
            f"state_head_dim {config.state_head_dim} does not divide 2 · d_model, {2 * config.d_model}: use a divisor, "
            "or set state_heads"
        )
    if config.resolved_state_heads % config.state_groups:
        yield (
            f"state_groups {config.state_groups} does not divide the {config.resolved_state_heads} state_heads: use a "
            "divisor"
        )


def _problems_of_sharing(config: Any) -> Iterator[str]:
    if config.kv_sharing == 1:
        return
    of = f"kv_sharing is {config.kv_sharing}, of layers that share keys and values"
    if config.kv_lora_rank is not None:
        yield f"kv_lora_rank is {config.kv_lora_rank} and {of}: latents are not shared, use one or the other"
    if any(mixer != "attention" for mixer in mixer_pattern(config.mixers)):
        yield f"mixers is '{config.mixers}' and {of}: use mixers 'attention', or kv_sharing 1"
    if config.full_attention_every is not None:
        yield (
            f"full_attention_every is {config.full_attention_every} and {of}: they see the same tokens, leave "
            "full_attention_every out"
        )


def _problems_of_experts(config: Any) -> Iterator[str]:
    if not config.n_experts:
        for name in ("n_shared_experts", "n_dense_layers", "d_expert", "expert_capacity", "router_bias"):
            if getattr(config, name):
                yield f"{name} is {getattr(config, name)} and there are no experts: set n_experts too"
        return
    if config.n_experts < config.experts_per_token:
        yield (
            f"experts_per_token {config.experts_per_token} exceeds n_experts {config.n_experts}: use at most "
            f"{config.n_experts}"
        )
    groups = config.n_expert_groups
    if config.n_experts % groups:
        yield f"n_expert_groups {groups} does not divide n_experts {config.n_experts}: use a divisor of it"
    if config.expert_groups_per_token > groups:
        yield f"expert_groups_per_token {config.expert_groups_per_token} exceeds n_expert_groups: use at most {groups}"
    in_groups = config.n_experts // groups * config.expert_groups_per_token
    if config.experts_per_token > in_groups:
        yield (
            f"experts_per_token {config.experts_per_token} exceeds the {in_groups} experts of a token's groups: use "
            "more expert_groups_per_token"
        )
    if config.router == "sigmoid" and 1 < groups == config.n_experts:
        yield f"n_expert_groups {groups} leaves groups of one expert, of which two are summed: use fewer groups"
    if config.biases == "all":
        yield "biases 'all' and n_experts: experts have no biases, use 'none' or 'qkv'"
    if config.mup_base_d_model is not None:
        yield "mup_base_d_model and n_experts: experts have no multipliers, use one or the other"
    if config.n_dense_layers >= config.n_layers:
        yield (
            f"n_dense_layers {config.n_dense_layers} leaves none of n_layers {config.n_layers} to the experts: use at "
            f"most {config.n_layers - 1}"
        )


MOST_MIXERS = 4096
"""Layers that a pattern of mixers may name."""


@functools.lru_cache(maxsize=64)
def mixer_pattern(mixers: str) -> tuple[TokenMixer, ...]:
    """The mixers that a pattern names, one for each of its layers.

    >>> mixer_pattern("mamba2*2, attention")
    ('mamba2', 'mamba2', 'attention')

    Raises NapkinError for a name or number that is none.
    """
    pattern: list[TokenMixer] = []
    for part in mixers.split(","):
        name, star, number = (each.strip() for each in part.partition("*"))
        if name not in TOKEN_MIXERS:
            raise NapkinError(f"mixers names '{name}', which is not a token mixer: {suggestion(name, TOKEN_MIXERS)}")
        if star and not (number.isdecimal() and 1 <= int(number[:9]) <= MOST_MIXERS):
            raise NapkinError(f"mixers has '{part.strip()}': use 1 to {MOST_MIXERS} layers, as in {name}*5")
        mixer = cast(TokenMixer, name)
        pattern.extend(mixer for _ in range(int(number) if star else 1))
        if len(pattern) > MOST_MIXERS:
            raise NapkinError(f"mixers names more than {MOST_MIXERS} layers: use a shorter pattern, it is repeated")
    return tuple(pattern)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is at least value."""
    return -(-value // multiple) * multiple


def same_pattern(mixers: Sequence[str]) -> str:
    """The pattern of layers with those mixers, equal patterns in equal words.

    >>> same_pattern(["mamba2", "mamba2", "attention"]), same_pattern(["mamba2", "mamba2"])
    ('mamba2*2,attention', 'mamba2')
    """
    if len(set(mixers)) == 1:
        return mixers[0]
    runs = [(name, len(list(same))) for name, same in itertools.groupby(mixers)]
    return ",".join(name if number == 1 else f"{name}*{number}" for name, number in runs)
