"""The weight names and config settings of Hugging Face's GPT-2, Llama and Granite models."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig


@dataclass(frozen=True)
class WeightMapping:
    """One parameter here, stored as one or more tensors there."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    """Rows of each tensor there; empty if there is one."""
    transposed: bool = False


@dataclass(frozen=True)
class Family:
    """A `model_type` of config.json."""

    prefix: str
    """Prefix of all names except the head's."""
    mappings: Callable[[ModelConfig], Iterator[WeightMapping]]
    settings: type
    """The types of the settings in config.json that `read` looks at."""
    read: Callable[[dict[str, Any]], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    factors: Callable[[dict[str, Any]], dict[str, float]] = lambda settings: {}
    """By an expression for parameters' names: a factor of their layers there, multiplied into the weights here."""

    def full_name(self, name: str) -> str:
        """A tensor's name in the folder of a model with its head."""
        return name if name.startswith("lm_head") else self.prefix + name


class _Gpt2Settings(msgspec.Struct):
    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    layer_norm_epsilon: float = 1e-5
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True


class _RopeSettings(msgspec.Struct):
    rope_type: str = "default"
    type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None


class _LlamaSettings(msgspec.Struct):
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
    rope_parameters: _RopeSettings | None = None
    rope_scaling: _RopeSettings | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


class _GraniteSettings(_LlamaSettings):
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


def _gpt2_mappings(config: ModelConfig) -> Iterator[WeightMapping]:
    yield WeightMapping("embedding.weight", ("wte.weight",))
    yield WeightMapping("positions.weight", ("wpe.weight",))
    layers = {
        "attention_norm": "ln_1",
        "attention.query_key_value": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "feed_forward_norm": "ln_2",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    }
    for layer in range(config.n_layers):
        for ours, theirs in layers.items():
            is_norm = ours.endswith("norm")
            ours, theirs = f"blocks.{layer}.{ours}", f"h.{layer}.{theirs}"
            # GPT-2's matrices are stored as [inputs, outputs].
            yield WeightMapping(
                f"{ours}.{'gain' if is_norm else 'weight'}", (f"{theirs}.weight",), transposed=not is_norm
            )
            yield WeightMapping(f"{ours}.bias", (f"{theirs}.bias",))
    yield WeightMapping("norm.gain", ("ln_f.weight",))
    yield WeightMapping("norm.bias", ("ln_f.bias",))


def _read_gpt2(settings: dict[str, Any]) -> ModelConfig:
    kinds = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"}
    if settings.get("scale_attn_by_inverse_layer_idx") or not settings.get("tie_word_embeddings", True):
        raise NapkinError("scores scaled by layer and untied heads are not supported: use GPT-2 as published")
    return ModelConfig(
        vocab_size=settings["vocab_size"],
        context_length=settings["n_positions"],
        d_model=settings["n_embd"],
        n_layers=settings["n_layer"],
        n_heads=settings["n_head"],
        d_ff=settings.get("n_inner"),
        norm_eps=settings.get("layer_norm_epsilon", 1e-5),
        positions="learned",
        norm="layer",
        feed_forward=_looked_up(kinds, settings.get("activation_function", "gelu_new"), "activation_function"),
        biases="all",
        embedding_scale=1.0,
        attention_scale=None if settings.get("scale_attn_weights", True) else 1.0,
        init="fixed",
        dropout=settings.get("resid_pdrop", 0.1),
    )


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    kinds = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu"}
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.context_length,
        "n_embd": config.d_model,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "n_inner": config.resolved_d_ff,
        "activation_function": kinds.get(config.feed_forward, "gelu_new"),
        "layer_norm_epsilon": config.norm_eps,
        "scale_attn_weights": config.attention_scale != 1,
        "tie_word_embeddings": True,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        # The tokenizer says which tokens these are.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _llama_mappings(config: ModelConfig) -> Iterator[WeightMapping]:
    yield WeightMapping("embedding.weight", ("embed_tokens.weight",))
    n_kv = config.resolved_n_kv_heads * config.resolved_head_dim
    qkv_rows = (config.n_heads * config.resolved_head_dim, n_kv, n_kv)
    for layer in range(config.n_layers):
        ours, theirs = f"blocks.{layer}", f"layers.{layer}"
        yield WeightMapping(f"{ours}.attention_norm.gain", (f"{theirs}.input_layernorm.weight",))
        qkv = tuple(f"{theirs}.self_attn.{name}_proj.weight" for name in "qkv")
        yield WeightMapping(f"{ours}.attention.query_key_value.weight", qkv, qkv_rows)
        yield WeightMapping(f"{ours}.attention.output.weight", (f"{theirs}.self_attn.o_proj.weight",))
        yield WeightMapping(f"{ours}.feed_forward_norm.gain", (f"{theirs}.post_attention_layernorm.weight",))
        gate_up = tuple(f"{theirs}.mlp.{name}_proj.weight" for name in ("gate", "up"))
        yield WeightMapping(f"{ours}.feed_forward.gate_up.weight", gate_up, (config.resolved_d_ff,) * 2)
        yield WeightMapping(f"{ours}.feed_forward.down.weight", (f"{theirs}.mlp.down_proj.weight",))
    yield WeightMapping("norm.gain", ("norm.weight",))
    if not config.tie_embeddings:
        yield WeightMapping("head.weight", ("lm_head.weight",))


def _read_llama(settings: dict[str, Any]) -> ModelConfig:
    for name in ("attention_bias", "mlp_bias"):
        if settings.get(name):
            raise NapkinError(f"{name} is true, which is not supported: use a Llama without biases")
    kinds = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}
    # Newer folders have rope_parameters, older ones rope_theta and rope_scaling.
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    scalings = {"default": "none", "linear": "linear", "yarn": "yarn", "llama3": "llama3"}
    scaling = _looked_up(scalings, rope.get("rope_type", rope.get("type", "default")), "rope_type")
    return ModelConfig(
        vocab_size=settings["vocab_size"],
        context_length=settings["max_position_embeddings"],
        d_model=settings["hidden_size"],
        n_layers=settings["num_hidden_layers"],
        n_heads=settings["num_attention_heads"],
        n_kv_heads=settings.get("num_key_value_heads"),
        head_dim=settings.get("head_dim"),
        d_ff=settings["intermediate_size"],
        norm_eps=settings.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", settings.get("rope_theta", 10000.0)),
        rope_scaling=scaling,
        rope_factor=1.0 if scaling == "none" else rope["factor"],
        rope_original_context=None if scaling == "none" else rope.get("original_max_position_embeddings"),
        feed_forward=_looked_up(kinds, settings.get("hidden_act", "silu"), "hidden_act"),
        tie_embeddings=settings.get("tie_word_embeddings", False),
        embedding_scale=1.0,
    )


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    kinds = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh", "reglu": "relu"}
    scalings = {"linear": "linear", "yarn": "yarn", "llama3": "llama3"}
    rope: dict[str, Any] = {
        "rope_type": scalings.get(config.rope_scaling, "default"),
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
        "hidden_act": kinds.get(config.feed_forward, "silu"),
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


def _read_granite(settings: dict[str, Any]) -> ModelConfig:
    if not settings.get("logits_scaling", 1.0) > 0:
        raise NapkinError(f"logits_scaling is {settings['logits_scaling']}: logits are divided by it, use more than 0")
    config = _read_llama(settings)
    scale = settings.get("attention_multiplier", 1.0)
    return dataclasses.replace(
        config,
        embedding_scale=settings.get("embedding_multiplier", 1.0),
        attention_scale=None if math.isclose(scale, config.resolved_head_dim**-0.5) else scale,
    )


def _granite_factors(settings: dict[str, Any]) -> dict[str, float]:
    residual, logits = settings.get("residual_multiplier", 1.0), settings.get("logits_scaling", 1.0)
    # The head may be the embedding: its input is scaled instead.
    return {r"blocks\.\d+\.(attention\.output|feed_forward\.down)\.weight": residual, r"norm\.gain": 1 / logits}


def _write_granite(config: ModelConfig) -> dict[str, Any]:
    scale = config.resolved_head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    return _write_llama(config) | {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": config.resolved_embedding_scale,
        "attention_multiplier": scale,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }


def _looked_up(table: dict[str, Any], name: str, setting: str) -> Any:
    if name not in table:
        raise NapkinError(f"{setting} is {name!r}, which is not supported: use one of {', '.join(table)}")
    return table[name]


FAMILIES = {
    "gpt2": Family("transformer.", _gpt2_mappings, _Gpt2Settings, _read_gpt2, _write_gpt2),
    "llama": Family("model.", _llama_mappings, _LlamaSettings, _read_llama, _write_llama),
    # Llama with four scales (Granite 3.0).
    "granite": Family("model.", _llama_mappings, _GraniteSettings, _read_granite, _write_granite, _granite_factors),
}
