"""Llama (Touvron et al. 2023), and what its relatives share with it: names of weights, sizes, rotary positions.

The names of weights follow from the config: norms by where the block has them, norms of queries and keys, biases and
experts where there are any.
"""

from collections.abc import Iterator
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
    """What is read of its config.json."""

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
    """The names of its weights."""
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
    """Its config here; `more` are what a relative has in addition."""
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
    """Its config.json, of what it can say of a config."""
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
