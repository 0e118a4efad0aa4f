"""Llama (Touvron et al. 2023), and what its relatives share with it: names of weights, sizes, rotary positions.

The names of weights follow from the config: norms by where the block has them, norms of queries and keys, biases and
experts where there are any.

Families that are Llama with changes: Granite 3, Mistral, Mixtral, Qwen 2 and 3, OLMo 2, Gemma 2.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.model.huggingface.family import WeightMapping, looked_up, refuse

_NORMS = {
    "pre": {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"},
    "reordered": {"attention_norm": "post_attention_layernorm", "feed_forward_norm": "post_feedforward_layernorm"},
    "sandwich": {
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_output_norm": "post_feedforward_layernorm",
    },
}
_ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}
_SCALINGS = {"default": "none", "linear": "linear", "yarn": "yarn", "llama3": "llama3"}


class RopeSettings(msgspec.Struct):
    """`rope_parameters`, in older folders `rope_scaling`."""

    rope_type: str | None = None
    type: str = "default"
    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    # Supported with these values alone.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    partial_rotary_factor: float = 1.0
    full_attention: Any = None
    sliding_attention: Any = None


class LlamaSettings(msgspec.Struct):
    """The settings that are read of Llama's config.json."""

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_parameters: RopeSettings | None = None
    rope_scaling: RopeSettings | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


def llama_mappings(config: ModelConfig) -> Iterator[WeightMapping]:
    yield WeightMapping("embedding.weight", ("embed_tokens.weight",))
    for layer in range(config.n_layers):
        for ours, theirs in _NORMS[config.block].items():
            yield WeightMapping(f"blocks.{layer}.{ours}.gain", (f"layers.{layer}.{theirs}.weight",))
        yield from _attention_mappings(config, f"blocks.{layer}.attention", f"layers.{layer}.self_attn")
        if config.n_experts:
            yield from _expert_mappings(config, f"blocks.{layer}.feed_forward", f"layers.{layer}.block_sparse_moe")
        else:
            yield from _feed_forward_mappings(config, f"blocks.{layer}.feed_forward", f"layers.{layer}.mlp")
    yield WeightMapping("norm.gain", ("norm.weight",))
    if not config.tie_embeddings:
        yield WeightMapping("head.weight", ("lm_head.weight",))


def _attention_mappings(config: ModelConfig, ours: str, theirs: str) -> Iterator[WeightMapping]:
    n_kv = config.resolved_n_kv_heads * config.resolved_head_dim
    rows = (config.n_heads * config.resolved_head_dim, n_kv, n_kv)
    for kind in ("weight", "bias") if config.biases == "qkv" else ("weight",):
        names = tuple(f"{theirs}.{name}_proj.{kind}" for name in "qkv")
        yield WeightMapping(f"{ours}.query_key_value.{kind}", names, rows)
    if config.qk_norm != "none":
        yield WeightMapping(f"{ours}.qk_norm.query_norm.gain", (f"{theirs}.q_norm.weight",))
        yield WeightMapping(f"{ours}.qk_norm.key_norm.gain", (f"{theirs}.k_norm.weight",))
    yield WeightMapping(f"{ours}.output.weight", (f"{theirs}.o_proj.weight",))


def _feed_forward_mappings(config: ModelConfig, ours: str, theirs: str) -> Iterator[WeightMapping]:
    gate_up = tuple(f"{theirs}.{name}_proj.weight" for name in ("gate", "up"))
    yield WeightMapping(f"{ours}.gate_up.weight", gate_up, (config.resolved_d_ff,) * 2)
    yield WeightMapping(f"{ours}.down.weight", (f"{theirs}.down_proj.weight",))


def _expert_mappings(config: ModelConfig, ours: str, theirs: str) -> Iterator[WeightMapping]:
    """Mixtral's: w1 is the gate, w3 the matrix beside it."""
    n, d_expert = config.n_experts, config.resolved_d_expert
    assert d_expert is not None
    yield WeightMapping(f"{ours}.router.weight", (f"{theirs}.gate.weight",))
    gate_up = tuple(f"{theirs}.experts.{expert}.{name}.weight" for expert in range(n) for name in ("w1", "w3"))
    yield WeightMapping(f"{ours}.experts.up", gate_up, (d_expert,) * 2 * n)
    down = tuple(f"{theirs}.experts.{expert}.w2.weight" for expert in range(n))
    yield WeightMapping(f"{ours}.experts.down", down, (config.d_model,) * n)


def read_llama(settings: LlamaSettings, **more: Any) -> ModelConfig:
    """The config of a Llama; `more` are the fields that a relative has in addition."""
    refuse(settings, "attention_bias", "mlp_bias")
    fields: dict[str, Any] = {
        "vocab_size": settings.vocab_size,
        "context_length": settings.max_position_embeddings,
        "d_model": settings.hidden_size,
        "n_layers": settings.num_hidden_layers,
        "n_heads": settings.num_attention_heads,
        "n_kv_heads": settings.num_key_value_heads,
        "head_dim": settings.head_dim,
        "d_ff": settings.intermediate_size,
        "norm_eps": settings.rms_norm_eps,
        "feed_forward": looked_up(_ACTIVATIONS, settings.hidden_act, "hidden_act"),
        "tie_embeddings": settings.tie_word_embeddings,
        "embedding_scale": 1.0,
        **_read_rope(settings),
    }
    return ModelConfig(**{**fields, **more})


def _read_rope(settings: LlamaSettings) -> dict[str, Any]:
    # Newer folders have rope_parameters, older ones rope_theta and rope_scaling.
    rope = settings.rope_parameters or settings.rope_scaling or RopeSettings()
    scaling = looked_up(_SCALINGS, rope.rope_type or rope.type, "rope_type")
    supported = RopeSettings()
    for name in RopeSettings.__struct_fields__[5:]:
        if (value := getattr(rope, name)) != getattr(supported, name):
            raise NapkinError(
                f"{name} of the rotary positions is {value!r}, which is not supported: use a model without it"
            )
    theta = settings.rope_theta if rope.rope_theta is None else rope.rope_theta
    if scaling == "none":
        return {"rope_theta": theta}
    if rope.factor is None:
        raise NapkinError(f"rope_type is {rope.rope_type or rope.type!r} and has no factor: download it again")
    # A factor of 1 scales nothing.
    return {
        "rope_theta": theta,
        "rope_scaling": "none" if rope.factor == 1 else scaling,
        "rope_factor": rope.factor,
        "rope_original_context": None if rope.factor == 1 else rope.original_max_position_embeddings,
    }


def write_llama(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a Llama, as far as it can say what a config says."""
    activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    rope: dict[str, Any] = {
        "rope_type": config.rope_scaling if config.rope_scaling in _SCALINGS else "default",
        "rope_theta": config.rope_theta,
    }
    if rope["rope_type"] != "default":
        rope |= {
            "factor": config.rope_factor,
            "original_max_position_embeddings": round(config.resolved_original_context),
        }
    if rope["rope_type"] == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.resolved_n_kv_heads,
        "head_dim": config.resolved_head_dim,
        "intermediate_size": config.resolved_d_ff,
        "hidden_act": activations.get(config.feed_forward, "silu"),
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "rope_scaling": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        # The tokenizer says which tokens these are.
        "bos_token_id": None,
        "eos_token_id": None,
    }


class GraniteSettings(LlamaSettings):
    """Llama's, and four scales."""

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


def read_granite(settings: GraniteSettings) -> ModelConfig:
    """The config of a Granite. Two of its scales are of weights, see `granite_factors`."""
    if not settings.logits_scaling > 0:
        raise NapkinError(f"logits_scaling is {settings.logits_scaling}: logits are divided by it, use more than 0")
    config = read_llama(settings, embedding_scale=settings.embedding_multiplier)
    return replace(config, attention_scale=_scale_unless_usual(config, settings.attention_multiplier))


def granite_factors(settings: GraniteSettings) -> dict[str, float]:
    """The scales of what layers write, and of logits: the head may be the embedding, its input is scaled instead."""
    residual, logits = settings.residual_multiplier, settings.logits_scaling
    return {r"blocks\.\d+\.(attention\.output|feed_forward\.down)\.weight": residual, r"norm\.gain": 1 / logits}


def write_granite(config: ModelConfig) -> dict[str, Any]:
    return write_llama(config) | {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": config.resolved_embedding_scale,
        "attention_multiplier": _scale(config),
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }


class MistralSettings(LlamaSettings):
    """Llama's, and a window (Jiang et al. 2023)."""

    num_key_value_heads: int | None = 8
    sliding_window: int | None = 4096


def read_mistral(settings: MistralSettings) -> ModelConfig:
    return read_llama(settings, attention_window=settings.sliding_window)


def write_mistral(config: ModelConfig) -> dict[str, Any]:
    return write_llama(config) | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": config.attention_window,
    }


class MixtralSettings(MistralSettings):
    """Mistral's, and experts (Jiang et al. 2024)."""

    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.001


def read_mixtral(settings: MixtralSettings) -> ModelConfig:
    return read_llama(
        settings,
        attention_window=settings.sliding_window,
        n_experts=settings.num_local_experts,
        experts_per_token=settings.num_experts_per_tok,
        balance_weight=settings.router_aux_loss_coef,
    )


def write_mixtral(config: ModelConfig) -> dict[str, Any]:
    return write_mistral(config) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": config.resolved_d_expert or config.resolved_d_ff,
        "num_local_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.balance_weight,
    }


class _LayerTypes(LlamaSettings):
    """Llama's, and which layers have a window."""

    sliding_window: int | None = 4096
    layer_types: list[str] | None = None


class Qwen2Settings(_LayerTypes):
    """Qwen 2 and 2.5: biases of queries, keys and values, and windows in some layers or none."""

    num_key_value_heads: int | None = 32
    use_sliding_window: bool = False
    max_window_layers: int = 28


class Qwen3Settings(Qwen2Settings):
    """Norms of queries and keys in place of the biases."""

    head_dim: int | None = 128


def read_qwen2(settings: Qwen2Settings) -> ModelConfig:
    return read_llama(settings, biases="qkv", **_qwen_windows(settings))


def read_qwen3(settings: Qwen3Settings) -> ModelConfig:
    return read_llama(settings, qk_norm="head", **_qwen_windows(settings))


def write_qwen2(config: ModelConfig) -> dict[str, Any]:
    return _write_qwen(config) | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return _write_qwen(config) | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def _write_qwen(config: ModelConfig) -> dict[str, Any]:
    return write_llama(config) | {
        "use_sliding_window": config.attention_window is not None,
        "sliding_window": config.attention_window,
        "max_window_layers": 0,
        "layer_types": _layer_types(config),
    }


def _qwen_windows(settings: Qwen2Settings) -> dict[str, int | None]:
    if not settings.use_sliding_window:
        return {}
    full = [layer < settings.max_window_layers for layer in range(min(settings.num_hidden_layers, 2**16))]
    return _windows(settings, full)


class Olmo2Settings(LlamaSettings):
    """OLMo 2 (2024): norms after layers, and of all queries and keys."""

    rms_norm_eps: float = 1e-5


def read_olmo2(settings: Olmo2Settings) -> ModelConfig:
    return read_llama(settings, block="reordered", qk_norm="all_heads")


def write_olmo2(config: ModelConfig) -> dict[str, Any]:
    return write_llama(config) | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}


class Gemma2Settings(_LayerTypes):
    """Gemma 2 (Gemma Team 2024)."""

    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    tie_word_embeddings: bool = True
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    use_bidirectional_attention: bool | None = None


def gemma2_mappings(config: ModelConfig) -> Iterator[WeightMapping]:
    """Llama's names; norms multiply by 1 more than what is stored."""
    for mapping in llama_mappings(config):
        yield replace(mapping, less=1.0) if mapping.ours.endswith(".gain") else mapping


def read_gemma2(settings: Gemma2Settings) -> ModelConfig:
    refuse(settings, "use_bidirectional_attention")
    if not settings.query_pre_attn_scalar > 0:
        raise NapkinError(f"query_pre_attn_scalar is {settings.query_pre_attn_scalar}: use a number above 0")
    settings.hidden_act = settings.hidden_activation
    # Every second layer has no window.
    full = [layer % 2 == 1 for layer in range(min(settings.num_hidden_layers, 2**16))]
    config = read_llama(
        settings,
        block="sandwich",
        embedding_scale=max(settings.hidden_size, 0) ** 0.5,
        attention_softcap=settings.attn_logit_softcapping,
        logit_softcap=settings.final_logit_softcapping,
        **_windows(settings, full),
    )
    return replace(config, attention_scale=_scale_unless_usual(config, settings.query_pre_attn_scalar**-0.5))


def write_gemma2(config: ModelConfig) -> dict[str, Any]:
    written = write_llama(config)
    return written | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": written["hidden_act"],
        "query_pre_attn_scalar": round(_scale(config) ** -2),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": config.attention_window or 4096,
        "layer_types": _layer_types(config),
    }


def _windows(settings: _LayerTypes, full: list[bool]) -> dict[str, int | None]:
    """attention_window and full_attention_every; `full` says which layers have no window unless layer_types does."""
    if settings.layer_types is not None:
        full = [kind == "full_attention" for kind in settings.layer_types]
        strange = set(settings.layer_types) - {"full_attention", "sliding_attention"}
        if strange or len(full) != settings.num_hidden_layers:
            raise NapkinError(
                f"layer_types names {len(full)} layers{', one of ' + repr(min(strange))[:50] if strange else ''}: use "
                f"'full_attention' or 'sliding_attention' for each of {settings.num_hidden_layers}"
            )
    if all(full):
        return {}
    if not any(full):
        return {"attention_window": settings.sliding_window}
    every = full.index(True) + 1
    if full != [(layer + 1) % every == 0 for layer in range(len(full))]:
        raise NapkinError("layers have windows in a pattern that is not supported: every so many-th without one is")
    return {"attention_window": settings.sliding_window, "full_attention_every": every}


def _layer_types(config: ModelConfig) -> list[str]:
    window, every = config.attention_window, config.full_attention_every
    full = [window is None or bool(every and (layer + 1) % every == 0) for layer in range(config.n_layers)]
    return ["full_attention" if each else "sliding_attention" for each in full]


def _scale(config: ModelConfig) -> float:
    return config.resolved_head_dim**-0.5 if config.attention_scale is None else config.attention_scale


def _scale_unless_usual(config: ModelConfig, scale: float) -> float | None:
    return None if math.isclose(scale, config.resolved_head_dim**-0.5) else scale
