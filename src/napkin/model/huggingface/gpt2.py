"""GPT-2 (Radford et al. 2019)."""

from collections.abc import Iterator
from typing import Any

import msgspec

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.model.huggingface.family import WeightMapping, looked_up


class Gpt2Settings(msgspec.Struct):
    """The settings that are read of GPT-2's config.json."""

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


def gpt2_mappings(config: ModelConfig) -> Iterator[WeightMapping]:
    """The names of its weights."""
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


def read_gpt2(settings: Gpt2Settings) -> ModelConfig:
    kinds = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"}
    if settings.scale_attn_by_inverse_layer_idx or not settings.tie_word_embeddings:
        raise NapkinError("scores scaled by layer and untied heads are not supported: use GPT-2 as published")
    return ModelConfig(
        vocab_size=settings.vocab_size,
        context_length=settings.n_positions,
        d_model=settings.n_embd,
        n_layers=settings.n_layer,
        n_heads=settings.n_head,
        d_ff=settings.n_inner,
        norm_eps=settings.layer_norm_epsilon,
        positions="learned",
        norm="layer",
        feed_forward=looked_up(kinds, settings.activation_function, "activation_function"),
        biases="all",
        embedding_scale=1.0,
        attention_scale=None if settings.scale_attn_weights else 1.0,
        init="fixed",
        dropout=settings.resid_pdrop,
    )


def write_gpt2(config: ModelConfig) -> dict[str, Any]:
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
