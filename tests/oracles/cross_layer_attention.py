"""Cross-layer attention in plain PyTorch: the definition, layer by layer, sharing no code with the package."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


def loss_of(weights: dict[str, Tensor], tokens: Tensor, targets: Tensor, config: Any) -> Tensor:
    """Mean cross-entropy of a pre-norm model with rotary positions, SwiGLU and tied embeddings.

    Each group of `config.kv_sharing` layers has the keys and values that its first layer makes.
    """
    table, width = weights["embedding.weight"], config.d_model // config.n_heads
    n_kv = config.n_kv_heads or config.n_heads
    x = table[tokens] * config.d_model**0.5
    keys = values = x
    for layer in range(config.n_layers):
        own = {name.partition(f"blocks.{layer}.")[2]: w for name, w in weights.items() if f"blocks.{layer}." in name}
        read = _norm(x, own["attention_norm.gain"], config.norm_eps)
        if layer % config.kv_sharing == 0:
            made = linear(read, own["attention.query_key_value.weight"])
            parts = made.split([config.d_model, n_kv * width, n_kv * width], dim=-1)
            queries, keys, values = (part.unflatten(-1, (-1, width)) for part in parts)
            keys = _turned(keys, config.rope_theta)
        else:
            queries = linear(read, own["attention.query.weight"]).unflatten(-1, (-1, width))
        queries = _turned(queries, config.rope_theta)
        groups = config.n_heads // n_kv
        scores = torch.einsum("bqhc,bkhc->bhqk", queries, keys.repeat_interleave(groups, 2)) / width**0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights_of_pairs = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        mixed = torch.einsum("bhqk,bkhc->bqhc", weights_of_pairs, values.repeat_interleave(groups, 2)).flatten(2)
        x = x + linear(mixed, own["attention.output.weight"])
        gate, up = linear(
            _norm(x, own["feed_forward_norm.gain"], config.norm_eps), own["feed_forward.gate_up.weight"]
        ).chunk(2, dim=-1)
        x = x + linear(silu(gate) * up, own["feed_forward.down.weight"])
    logits = linear(_norm(x, weights["norm.gain"], config.norm_eps), table)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def _turned(heads: Tensor, theta: float) -> Tensor:
    half = heads.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=heads.dtype) / half)
    angles = torch.arange(heads.shape[1], dtype=heads.dtype)[:, None] * frequencies
    points = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((points.real, points.imag), dim=-1)
