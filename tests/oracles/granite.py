"""Granite 3.0's logits from a Hugging Face folder, in NumPy float64, sharing no code with the package.

Llama's blocks with four constants: embeddings times embedding_multiplier, scores times attention_multiplier, what a
layer writes times residual_multiplier, logits divided by logits_scaling.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float64]


def logits(folder: Path, tokens: NDArray[np.int64]) -> Array:
    """[position, vocab_size] of one sequence."""
    c: dict[str, Any] = json.loads((folder / "config.json").read_text())
    assert c["architectures"] == ["GraniteForCausalLM"]
    assert (c["hidden_act"], c["rope_parameters"]["rope_type"]) == ("silu", "default")
    w = {name: tensor.astype(np.float64) for name, tensor in load_file(folder / "model.safetensors").items()}
    x = w["model.embed_tokens.weight"][tokens] * c["embedding_multiplier"]
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in w.items() if name.startswith(prefix)}
        read = _rms_norm(x, own["input_layernorm.weight"], c["rms_norm_eps"])
        x = x + c["residual_multiplier"] * _attention(own, read, c)
        read = _rms_norm(x, own["post_attention_layernorm.weight"], c["rms_norm_eps"])
        gate, up = read @ own["mlp.gate_proj.weight"].T, read @ own["mlp.up_proj.weight"].T
        x = x + c["residual_multiplier"] * ((gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj.weight"].T)
    x = _rms_norm(x, w["model.norm.weight"], c["rms_norm_eps"])
    head = w["model.embed_tokens.weight"] if c["tie_word_embeddings"] else w["lm_head.weight"]
    return x @ head.T / c["logits_scaling"]


def _rms_norm(x: Array, gain: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * gain


def _attention(own: dict[str, Array], x: Array, c: dict[str, Any]) -> Array:
    n_heads, n_kv, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    q, k, v = ((x @ own[f"self_attn.{name}_proj.weight"].T).reshape(len(x), -1, width) for name in "qkv")
    q, k = (_turned(part, c["rope_parameters"]["rope_theta"]) for part in (q, k))
    mixed = np.zeros((len(x), n_heads, width))
    for head in range(n_heads):
        shared = head // (n_heads // n_kv)
        for i in range(len(x)):
            scores = c["attention_multiplier"] * (k[: i + 1, shared] @ q[i, head])
            weights = np.exp(scores - scores.max())
            mixed[i, head] = weights / weights.sum() @ v[: i + 1, shared]
    return mixed.reshape(len(x), -1) @ own["self_attn.o_proj.weight"].T


def _turned(x: Array, theta: float) -> Array:
    """Number i and number i + width/2 of a head, turned by position · theta^(-2i/width)."""
    half = x.shape[-1] // 2
    angles = [[t * math.pow(theta, -i / half) for i in range(half)] for t in range(len(x))]
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.array(angles))[:, None]
    return np.concatenate((turned.real, turned.imag), axis=-1)
