"""What cannot be one model, and why: each refusal names the value and a way out."""

from typing import TYPE_CHECKING

from napkin.errors import NapkinError

if TYPE_CHECKING:
    from napkin.model.config import ModelConfig

_MAY_BE_ZERO = frozenset(
    "vocab_size dropout n_experts n_shared_experts n_dense_layers balance_weight router_z_weight z_weight".split()
)


def refuse_impossible(config: "ModelConfig") -> None:
    """Raise NapkinError for the first of the config's values that does not fit the others."""
    _refuse_sizes(config)
    _refuse_heads(config)
    _refuse_positions(config)
    _refuse_attention(config)
    _refuse_experts(config)


def round_up(value: int, multiple: int) -> int:
    """The first multiple that is not below value."""
    return -(-value // multiple) * multiple


def _refuse_sizes(config: "ModelConfig") -> None:
    for name, value in vars(config).items():
        if value is None or isinstance(value, (bool, str)):
            continue
        if name in _MAY_BE_ZERO:
            # A negated comparison catches NaN too.
            if not value >= 0:
                raise NapkinError(f"{name} is {value}: use 0 or more")
        elif not value > 0:
            raise NapkinError(f"{name} is {value}: use a number above 0")
    if config.dropout >= 1:
        raise NapkinError(f"dropout is {config.dropout}: use less than 1, or nothing is left")


def _refuse_heads(config: "ModelConfig") -> None:
    if config.head_dim is None and config.d_model % config.n_heads:
        raise NapkinError(
            f"d_model {config.d_model} does not divide into n_heads {config.n_heads}: use d_model "
            f"{round_up(config.d_model, config.n_heads)}, another n_heads, or name head_dim"
        )
    if config.n_heads % config.resolved_n_kv_heads:
        raise NapkinError(
            f"n_heads {config.n_heads} does not divide into n_kv_heads {config.resolved_n_kv_heads} groups: use "
            f"a divisor of {config.n_heads}"
        )


def _refuse_positions(config: "ModelConfig") -> None:
    if config.positions == "rope" and config.resolved_head_dim % 2:
        raise NapkinError(
            f"d_model {config.d_model} over n_heads {config.n_heads} makes heads of {config.resolved_head_dim}, rotary "
            f"positions need an even number: use d_model {config.n_heads * (config.resolved_head_dim + 1)}"
            if config.head_dim is None
            else f"head_dim is {config.head_dim}, rotary positions need an even number: use {config.head_dim + 1}"
        )
    if config.positions == "sinusoidal" and config.d_model % 2:
        raise NapkinError(
            f"d_model is {config.d_model}, sinusoidal positions need an even number: use {config.d_model + 1}"
        )
    if config.rope_scaling != "none" and config.positions != "rope":
        raise NapkinError(
            f"rope_scaling is '{config.rope_scaling}' and positions are '{config.positions}': use positions 'rope', or "
            "rope_scaling 'none'"
        )
    if config.rope_factor < 1:
        raise NapkinError(f"rope_factor is {config.rope_factor}: use 1 or more, rotary positions are only stretched")
    if (config.rope_scaling == "none") != (config.rope_factor == 1):
        raise NapkinError(
            f"rope_scaling is '{config.rope_scaling}' and rope_factor is {config.rope_factor}: use a scaling with a "
            "factor above 1, or 'none' with 1"
        )
    if config.rope_scaling == "none" and config.rope_original_context is not None:
        raise NapkinError(
            f"rope_original_context is {config.rope_original_context} and rope_scaling is 'none': name a rope_scaling "
            "too, or leave it out"
        )
    if config.rope_scaling == "ntk" and config.resolved_head_dim == 2:
        raise NapkinError(
            "rope_scaling is 'ntk' and heads are 2 wide: their one wavelength cannot be stretched, use 'linear'"
        )


def _refuse_attention(config: "ModelConfig") -> None:
    if config.attention_softcap is not None and config.attention == "sdpa":
        raise NapkinError(
            f"attention_softcap is {config.attention_softcap}, which the fused operator of attention 'sdpa' cannot do: "
            "use attention 'plain' or 'flex'"
        )


def _refuse_experts(config: "ModelConfig") -> None:
    if not config.n_experts:
        for name in ("n_shared_experts", "n_dense_layers", "d_expert", "expert_capacity"):
            if getattr(config, name):
                raise NapkinError(f"{name} is {getattr(config, name)} and there are no experts: name n_experts too")
        return
    if config.n_experts < config.experts_per_token:
        raise NapkinError(
            f"experts_per_token {config.experts_per_token} exceeds n_experts {config.n_experts}: use at most "
            f"{config.n_experts}"
        )
    if config.biases == "all":
        raise NapkinError("biases 'all' and n_experts: experts have no biases, use 'none' or 'qkv'")
    if config.mup_base_d_model is not None:
        raise NapkinError("mup_base_d_model and n_experts: experts have no multipliers, use one or the other")
    if config.n_dense_layers >= config.n_layers:
        raise NapkinError(
            f"n_dense_layers {config.n_dense_layers} leaves none of n_layers {config.n_layers} to the experts: use at "
            f"most {config.n_layers - 1}"
        )
