"""The family of DeepSeek-V3 (2024) in Hugging Face folders: latent attention, and experts in groups.

Its module for a second token, a layer more in published folders, is not read.
"""

import math
from collections.abc import Iterator
from typing import Any

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.model.huggingface.families import (
    Family,
    LlamaSettings,
    RopeSettings,
    WeightMapping,
    score_scale,
    write_llama,
)


def _mappings(config: ModelConfig) -> Iterator[WeightMapping]:
    yield WeightMapping("embedding.weight", ("embed_tokens.weight",))
    for layer in range(config.n_layers):
        ours, theirs = f"blocks.{layer}", f"layers.{layer}"
        yield WeightMapping(f"{ours}.attention_norm.gain", (f"{theirs}.input_layernorm.weight",))
        yield WeightMapping(f"{ours}.feed_forward_norm.gain", (f"{theirs}.post_attention_layernorm.weight",))
        yield from _attention_mappings(config, f"{ours}.attention", f"{theirs}.self_attn")
        of_layer = _expert_mappings if config.n_experts and layer >= config.n_dense_layers else _dense_mappings
        yield from of_layer(config, f"{ours}.feed_forward", f"{theirs}.mlp")
    yield WeightMapping("norm.gain", ("norm.weight",))
    if not config.tie_embeddings:
        yield WeightMapping("head.weight", ("lm_head.weight",))


def _attention_mappings(config: ModelConfig, ours: str, theirs: str) -> Iterator[WeightMapping]:
    """Mappings of a layer's attention: in these folders the queries have a matrix for latents of their own."""
    assert config.kv_lora_rank is not None
    names, rows = (f"{theirs}.kv_a_proj_with_mqa.weight",), (config.kv_lora_rank + config.resolved_qk_rope_head_dim,)
    if config.q_lora_rank is None:
        yield WeightMapping(f"{ours}.latents.weight", names)
        yield WeightMapping(f"{ours}.query.weight", (f"{theirs}.q_proj.weight",))
    else:
        names, rows = (f"{theirs}.q_a_proj.weight", *names), (config.q_lora_rank, *rows)
        yield WeightMapping(f"{ours}.latents.weight", names, rows)
        yield WeightMapping(f"{ours}.query_norm.gain", (f"{theirs}.q_a_layernorm.weight",))
        yield WeightMapping(f"{ours}.query.weight", (f"{theirs}.q_b_proj.weight",))
    yield WeightMapping(f"{ours}.key_value_norm.gain", (f"{theirs}.kv_a_layernorm.weight",))
    yield WeightMapping(f"{ours}.key_value.weight", (f"{theirs}.kv_b_proj.weight",))
    yield WeightMapping(f"{ours}.output.weight", (f"{theirs}.o_proj.weight",))


def _dense_mappings(config: ModelConfig, ours: str, theirs: str) -> Iterator[WeightMapping]:
    yield from _gated_mappings(ours, theirs, config.resolved_d_ff)


def _gated_mappings(ours: str, theirs: str, d_ff: int) -> Iterator[WeightMapping]:
    gate_up = tuple(f"{theirs}.{name}_proj.weight" for name in ("gate", "up"))
    yield WeightMapping(f"{ours}.gate_up.weight", gate_up, (d_ff,) * 2)
    yield WeightMapping(f"{ours}.down.weight", (f"{theirs}.down_proj.weight",))


def _expert_mappings(config: ModelConfig, ours: str, theirs: str) -> Iterator[WeightMapping]:
    n, d_expert = config.n_experts, config.resolved_d_expert
    assert d_expert is not None
    yield WeightMapping(f"{ours}.router.weight", (f"{theirs}.gate.weight",))
    gate_up = tuple(f"{theirs}.experts.{expert}.{name}_proj.weight" for expert in range(n) for name in ("gate", "up"))
    yield WeightMapping(f"{ours}.experts.up", gate_up, (d_expert,) * 2 * n)
    down = tuple(f"{theirs}.experts.{expert}.down_proj.weight" for expert in range(n))
    yield WeightMapping(f"{ours}.experts.down", down, (config.d_model,) * n)
    if config.router_bias:
        yield WeightMapping(f"{ours}.choice_bias", (f"{theirs}.gate.e_score_correction_bias",))
    if config.n_shared_experts:
        yield from _gated_mappings(f"{ours}.shared", f"{theirs}.shared_experts", config.n_shared_experts * d_expert)


class DeepseekRopeSettings(RopeSettings):
    """Settings of YaRN with a scale of attention scores."""

    mscale: float | None = None
    mscale_all_dim: float | None = None


class DeepseekV3Settings(LlamaSettings):
    """DeepSeek-V3 (2024): latent attention, experts in groups. Its module for a second token is not read."""

    num_key_value_heads: int | None = 128
    rope_parameters: DeepseekRopeSettings | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    rope_scaling: DeepseekRopeSettings | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    rope_interleave: bool | None = True
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int | None = 128
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    n_shared_experts: int | None = 1
    num_experts_per_tok: int = 8
    n_group: int | None = 8
    topk_group: int | None = 4
    norm_topk_prob: bool | None = True
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int | None = 3
    # Supported with these values alone.
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    moe_layer_freq: int = 1


_FIELDS = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "moe_intermediate_size": "d_expert",
    "n_routed_experts": "n_experts",
    "num_experts_per_tok": "experts_per_token",
    "norm_topk_prob": "normalize_expert_weights",
    "routed_scaling_factor": "expert_scale",
    "n_group": "n_expert_groups",
    "topk_group": "expert_groups_per_token",
    "first_k_dense_replace": "n_dense_layers",
    "n_shared_experts": "n_shared_experts",
}
_NORM_EPS = 1e-6
"""Epsilon of the norms of latents, whatever rms_norm_eps is."""


def _read_deepseek(settings: DeepseekV3Settings) -> dict[str, Any]:
    for name, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if (value := getattr(settings, name)) != only:
            raise NapkinError(f"{name} is {value!r}, which is not supported: use a model with {only!r}")
    if settings.rms_norm_eps != _NORM_EPS:
        raise NapkinError(
            f"rms_norm_eps is {settings.rms_norm_eps}, and norms of latents have {_NORM_EPS} there: one for "
            "all norms is supported"
        )
    rope, length = _deepseek_rope(settings), None
    if rope.mscale and rope.mscale_all_dim and rope.factor:
        length = _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return {
        "head_dim": None,
        "rope_pairing": "interleaved" if settings.rope_interleave else "halves",
        "rope_length": length,
        "normalize_expert_weights": bool(settings.norm_topk_prob),
        # None for models without them.
        "n_shared_experts": settings.n_shared_experts or 0,
        "n_dense_layers": settings.first_k_dense_replace or 0,
        "n_expert_groups": settings.n_group or 1,
        "expert_groups_per_token": settings.topk_group or 1,
    }


def _write_deepseek(config: ModelConfig) -> dict[str, Any]:
    if config.kv_lora_rank is None or not config.n_experts:
        raise NapkinError("a DeepSeek has latent attention and experts: use another family")
    written: dict[str, Any] = {
        "head_dim": config.resolved_qk_rope_head_dim,
        "qk_head_dim": config.resolved_head_dim,
        "rope_interleave": config.rope_pairing == "interleaved",
        "num_nextn_predict_layers": 0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }
    if config.rope_scaling == "yarn":
        # Scores are scaled by the square of the second.
        of_scores = (score_scale(config) * config.resolved_head_dim**0.5) ** 0.5
        more = math.log(config.rope_factor) / 10
        scales = {
            "mscale": (config.resolved_rope_length * of_scores - 1) / more,
            "mscale_all_dim": (of_scores - 1) / more,
        }
        rope = {**write_llama(config)["rope_parameters"], **(scales if all(scales.values()) else {})}
        written |= {"rope_parameters": rope, "rope_scaling": rope}
    return written


def _deepseek_attention_scale(settings: DeepseekV3Settings) -> float:
    rope, scale = _deepseek_rope(settings), 1.0
    if (rope.rope_type or rope.type) != "default" and rope.mscale_all_dim and rope.factor:
        scale = _yarn_scale(rope.factor, rope.mscale_all_dim) ** 2
    return scale * (settings.qk_nope_head_dim + settings.qk_rope_head_dim) ** -0.5


def _deepseek_rope(settings: DeepseekV3Settings) -> DeepseekRopeSettings:
    return settings.rope_parameters or settings.rope_scaling or DeepseekRopeSettings()


def _yarn_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    settings=DeepseekV3Settings,
    fixed={"router": "sigmoid", "router_bias": True},
    fields=_FIELDS,
    read_more=_read_deepseek,
    write_more=_write_deepseek,
    attention_scale=_deepseek_attention_scale,
    mappings=_mappings,
)
