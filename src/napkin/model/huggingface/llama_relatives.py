"""Families that are Llama with changes: Granite 3, Mistral, Mixtral, Qwen 2 and 3, OLMo 2, Gemma 2."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.model.huggingface.family import WeightMapping, refuse
from napkin.model.huggingface.llama import LlamaSettings, llama_mappings, read_llama, write_llama


class GraniteSettings(LlamaSettings):
    """Llama's, and four scales."""

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


def read_granite(settings: GraniteSettings) -> ModelConfig:
    """Its config here. Two of its scales are of weights, see `granite_factors`."""
    if not settings.logits_scaling > 0:
        raise NapkinError(f"logits_scaling is {settings.logits_scaling}: logits are divided by it, use more than 0")
    config = read_llama(settings, embedding_scale=settings.embedding_multiplier)
    return replace(config, attention_scale=_scale_unless_usual(config, settings.attention_multiplier))


def granite_factors(settings: GraniteSettings) -> dict[str, float]:
    """The scales of what layers write, and of logits: the head may be the embedding, its input is scaled instead."""
    residual, logits = settings.residual_multiplier, settings.logits_scaling
    return {r"blocks\.\d+\.(attention\.output|feed_forward\.down)\.weight": residual, r"norm\.gain": 1 / logits}


def write_granite(config: ModelConfig) -> dict[str, Any]:
    """Its config.json."""
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
    """Its config here."""
    return read_llama(settings, attention_window=settings.sliding_window)


def write_mistral(config: ModelConfig) -> dict[str, Any]:
    """Its config.json."""
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
    """Its config here."""
    return read_llama(
        settings,
        attention_window=settings.sliding_window,
        n_experts=settings.num_local_experts,
        experts_per_token=settings.num_experts_per_tok,
        balance_weight=settings.router_aux_loss_coef,
    )


def write_mixtral(config: ModelConfig) -> dict[str, Any]:
    """Its config.json."""
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
    """Its config here."""
    return read_llama(settings, biases="qkv", **_qwen_windows(settings))


def read_qwen3(settings: Qwen3Settings) -> ModelConfig:
    """Its config here."""
    return read_llama(settings, qk_norm="head", **_qwen_windows(settings))


def write_qwen2(config: ModelConfig) -> dict[str, Any]:
    """Its config.json."""
    return _write_qwen(config) | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    """Its config.json."""
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
    """Its config here."""
    return read_llama(settings, block="reordered", qk_norm="all_heads")


def write_olmo2(config: ModelConfig) -> dict[str, Any]:
    """Its config.json."""
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
    """Its config here."""
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
    """Its config.json."""
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
