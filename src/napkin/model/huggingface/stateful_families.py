"""Families of Hugging Face models whose layers carry a state: Mamba-2, and Granite 4 without experts, a hybrid.

Their state-space layers have the same weights under the same names. `ALL_FAMILIES` are these, DeepSeek's and those
of `families.py`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.model.config_checks import same_pattern
from napkin.model.huggingface.deepseek_family import DEEPSEEK_V3
from napkin.model.huggingface.families import (
    FAMILIES,
    Family,
    GraniteSettings,
    WeightMapping,
    attention_mappings,
    granite_factors,
    read_fields,
    read_llama,
    refuse_settings,
    write_fields,
    write_granite,
    write_llama,
)

_MIXER = {
    "input.weight": "in_proj.weight",
    "convolution.weight": "conv1d.weight",
    "convolution.bias": "conv1d.bias",
    "step_bias": "dt_bias",
    "log_decay": "A_log",
    "skip": "D",
    "norm.gain": "norm.weight",
    "output.weight": "out_proj.weight",
}


def _mixer_mappings(config: ModelConfig, ours: str, theirs: str) -> Iterator[WeightMapping]:
    for here, there in _MIXER.items():
        yield WeightMapping(f"{ours}.{here}", (f"{theirs}.{there}",))
    if config.biases == "all":
        yield WeightMapping(f"{ours}.input.bias", (f"{theirs}.in_proj.bias",))
        yield WeightMapping(f"{ours}.output.bias", (f"{theirs}.out_proj.bias",))


def _mamba2_mappings(config: ModelConfig) -> Iterator[WeightMapping]:
    yield WeightMapping("embedding.weight", ("embeddings.weight",))
    for layer in range(config.n_layers):
        yield WeightMapping(f"blocks.{layer}.mixer_norm.gain", (f"layers.{layer}.norm.weight",))
        yield from _mixer_mappings(config, f"blocks.{layer}.mixer", f"layers.{layer}.mixer")
    yield WeightMapping("norm.gain", ("norm_f.weight",))
    if not config.tie_embeddings:
        yield WeightMapping("head.weight", ("lm_head.weight",))


class Mamba2Settings(msgspec.Struct):
    """The settings that are read of Mamba-2's config.json."""

    vocab_size: int = 32768
    hidden_size: int = 4096
    num_hidden_layers: int = 64
    num_heads: int = 128
    head_dim: int = 64
    state_size: int = 128
    n_groups: int = 8
    conv_kernel: int = 4
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    """Not a setting of transformers, whose model has no limit; the published models were trained on sequences of this
    length."""
    # Supported with these values alone.
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    time_step_limit: Any = None


_MAMBA2_FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_heads": "state_heads",
    "head_dim": "state_head_dim",
    "state_size": "state_size",
    "n_groups": "state_groups",
    "conv_kernel": "conv_width",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}


def _read_mamba2(settings: Mamba2Settings) -> dict[str, Any]:
    refuse_settings(settings, "use_bias")
    _refuse_variants(settings.use_conv_bias, settings.hidden_act, settings.time_step_limit)
    return read_fields(settings, _MAMBA2_FIELDS)


def _write_mamba2(config: ModelConfig) -> dict[str, Any]:
    width = config.resolved_state_heads * config.state_head_dim
    return write_fields(config, _MAMBA2_FIELDS) | {
        "expand": width // config.d_model,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "residual_in_fp32": True,
    }


def _refuse_variants(conv_bias: bool, activation: str, limits: Any) -> None:
    """Raise NapkinError for settings that the layer here does not have."""
    if not conv_bias:
        raise NapkinError("the convolution has no bias, which is not supported: use a model with one")
    if activation != "silu":
        raise NapkinError(f"hidden_act is {activation!r}: state-space layers are supported with 'silu'")
    # JSON has no infinity, which the library writes as a word.
    if limits not in (None, *([0.0, each] for each in (math.inf, "Infinity", {"__float__": "Infinity"}))):
        raise NapkinError(f"time_step_limit is {limits!r}, which is not supported: use a model without limits")


class GraniteHybridSettings(GraniteSettings):
    """Granite 4 (2025): state-space layers with some of attention, feed-forward layers without experts."""

    shared_intermediate_size: int = 1024
    intermediate_size: int = 11008
    num_local_experts: int = 8
    position_embedding_type: str | None = None
    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None
    mamba_n_heads: int = 128
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_head: int | Literal["auto"] = "auto"
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: Any = None


_HYBRID_FIELDS = {
    "shared_intermediate_size": "d_ff",
    "mamba_n_heads": "state_heads",
    "mamba_n_groups": "state_groups",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_width",
}
_MIXER_OF = {"mamba": "mamba2", "linear_attention": "mamba2", "attention": "attention", "full_attention": "attention"}


def _read_granite_hybrid(settings: GraniteHybridSettings) -> dict[str, Any]:
    refuse_settings(settings, "num_local_experts", "mamba_proj_bias")
    _refuse_variants(settings.mamba_conv_bias, settings.hidden_act, settings.time_step_limit)
    kinds = settings.layer_types or settings.layers_block_type or ["mamba"] * min(settings.num_hidden_layers, 2**16)
    strange = set(kinds) - _MIXER_OF.keys()
    if strange or len(kinds) != settings.num_hidden_layers:
        raise NapkinError(
            f"layer_types names {len(kinds)} layers{', one of ' + repr(min(strange))[:50] if strange else ''}: use "
            f"'mamba' or 'attention' for each of {settings.num_hidden_layers}"
        )
    width = settings.mamba_expand * settings.hidden_size
    head_dim = width // settings.mamba_n_heads if settings.mamba_d_head == "auto" else settings.mamba_d_head
    return {
        "mixers": same_pattern([_MIXER_OF[kind] for kind in kinds]),
        "positions": "rope" if settings.position_embedding_type == "rope" else "none",
        "state_head_dim": head_dim,
    }


def _write_granite_hybrid(config: ModelConfig) -> dict[str, Any]:
    width = config.resolved_state_heads * config.state_head_dim
    kinds = ["mamba" if mixer == "mamba2" else "attention" for mixer in config.layer_mixers]
    return write_granite(config) | {
        "num_local_experts": 0,
        "position_embedding_type": "rope" if config.positions == "rope" else None,
        "layer_types": kinds,
        "mamba_d_head": config.state_head_dim,
        "mamba_expand": max(1, width // config.d_model),
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }


def _granite_hybrid_mappings(config: ModelConfig) -> Iterator[WeightMapping]:
    yield WeightMapping("embedding.weight", ("embed_tokens.weight",))
    for layer, mixer in enumerate(config.layer_mixers):
        ours, theirs = f"blocks.{layer}", f"layers.{layer}"
        norm = "mixer_norm" if mixer == "mamba2" else "attention_norm"
        yield WeightMapping(f"{ours}.{norm}.gain", (f"{theirs}.input_layernorm.weight",))
        yield WeightMapping(f"{ours}.feed_forward_norm.gain", (f"{theirs}.post_attention_layernorm.weight",))
        if mixer == "mamba2":
            yield from _mixer_mappings(config, f"{ours}.mixer", f"{theirs}.mamba")
        else:
            yield from attention_mappings(config, ours, theirs)
        yield WeightMapping(f"{ours}.feed_forward.gate_up.weight", (f"{theirs}.shared_mlp.input_linear.weight",))
        yield WeightMapping(f"{ours}.feed_forward.down.weight", (f"{theirs}.shared_mlp.output_linear.weight",))
    yield WeightMapping("norm.gain", ("norm.weight",))
    if not config.tie_embeddings:
        yield WeightMapping("head.weight", ("lm_head.weight",))


def _hybrid_factors(settings: Any) -> dict[str, float]:
    """Granite's, of what state-space layers write too."""
    return {**granite_factors(settings), r"blocks\.\d+\.mixer\.output\.weight": settings.residual_multiplier}


ALL_FAMILIES: Mapping[str, Family] = {
    **FAMILIES,
    "deepseek_v3": DEEPSEEK_V3,
    "mamba2": Family(
        architecture="Mamba2ForCausalLM",
        settings=Mamba2Settings,
        fixed={"mixers": "mamba2", "feed_forward": "none", "positions": "none"},
        read_base=_read_mamba2,
        write_base=_write_mamba2,
        mappings=_mamba2_mappings,
        prefix="backbone.",
    ),
    "granitemoehybrid": Family(
        architecture="GraniteMoeHybridForCausalLM",
        settings=GraniteHybridSettings,
        fields={"embedding_multiplier": "embedding_scale", **_HYBRID_FIELDS},
        attention_scale=lambda settings: settings.attention_multiplier,
        read_base=read_llama,
        write_base=write_llama,
        read_more=_read_granite_hybrid,
        write_more=_write_granite_hybrid,
        factors=_hybrid_factors,
        mappings=_granite_hybrid_mappings,
    ),
}
"""A model is saved as the first of these that has all its settings."""
