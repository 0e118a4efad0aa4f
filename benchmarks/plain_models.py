# pyright: reportIndexIssue=false
"""GPT-2, Llama and nanochat's model as one would write them with torch.nn and no further thought: what benchmarks
compare with."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Cache = tuple[Tensor, Tensor]
"""Keys and values of a layer, [batch, head, place, width]."""


class PlainGPT2(nn.Module):
    def __init__(self, vocab_size: int, length: int, n_layers: int, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, d_model), nn.Embedding(length, d_model)
        self.layers: Any = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(d_model),
                    "qkv": nn.Linear(d_model, 3 * d_model),
                    "out": nn.Linear(d_model, d_model),
                    "norm2": nn.LayerNorm(d_model),
                    "up": nn.Linear(d_model, 4 * d_model),
                    "down": nn.Linear(4 * d_model, d_model),
                }
            )
            for _ in range(n_layers)
        )
        self.norm = nn.LayerNorm(d_model)
        self.n_heads = n_heads
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            q, k, v = (
                part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
                for part in layer["qkv"](layer["norm1"](x)).chunk(3, dim=-1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](mixed.transpose(1, 2).flatten(2))
            x = x + layer["down"](F.gelu(layer["up"](layer["norm2"](x)), approximate="tanh"))
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class PlainLlama(nn.Module):
    angles: Tensor

    def __init__(
        self, vocab_size: int, length: int, n_layers: int, d_model: int, n_heads: int, n_kv_heads: int, d_ff: int
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, head_dim = n_heads, n_kv_heads, d_model // n_heads
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.layers: Any = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.RMSNorm(d_model),
                    "q": nn.Linear(d_model, d_model, bias=False),
                    "k": nn.Linear(d_model, n_kv_heads * head_dim, bias=False),
                    "v": nn.Linear(d_model, n_kv_heads * head_dim, bias=False),
                    "out": nn.Linear(d_model, d_model, bias=False),
                    "norm2": nn.RMSNorm(d_model),
                    "gate": nn.Linear(d_model, d_ff, bias=False),
                    "up": nn.Linear(d_model, d_ff, bias=False),
                    "down": nn.Linear(d_ff, d_model, bias=False),
                }
            )
            for _ in range(n_layers)
        )
        self.norm, self.head = nn.RMSNorm(d_model), nn.Linear(d_model, vocab_size, bias=False)
        places = torch.arange(length)[:, None]
        self.register_buffer("angles", places * 10000 ** (-torch.arange(0, head_dim, 2) / head_dim))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(tokens)).flatten(0, 1).float(), targets.flatten())

    def hidden(self, tokens: Tensor, cache: list[Cache] | None = None, places: Tensor | None = None) -> Tensor:
        """Final hidden states; with a cache those of tokens at these places, whose keys and values it keeps."""
        x = self.tokens(tokens)
        angles = self.angles[: tokens.shape[1]] if places is None else self.angles[places]
        for number, layer in enumerate(self.layers):
            read = layer["norm1"](x)
            q = turned(layer["q"](read).unflatten(-1, (self.n_heads, -1)).transpose(1, 2), angles)
            k = turned(layer["k"](read).unflatten(-1, (self.n_kv_heads, -1)).transpose(1, 2), angles)
            v = layer["v"](read).unflatten(-1, (self.n_kv_heads, -1)).transpose(1, 2)
            seen = None
            if cache is not None and places is not None:
                keys, values = cache[number]
                k, v = keys.index_copy_(2, places, k), values.index_copy_(2, places, v)
                seen = torch.arange(keys.shape[2], device=k.device) <= places[:, None]
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True)
            x = x + layer["out"](mixed.transpose(1, 2).flatten(2))
            read = layer["norm2"](x)
            x = x + layer["down"](F.silu(layer["gate"](read)) * layer["up"](read))
        return self.norm(x)

    def cache(self, batch: int, capacity: int) -> list[Cache]:
        """Return room for keys and values of each layer."""
        weight = self.head.weight
        shape = batch, self.n_kv_heads, capacity, 2 * self.angles.shape[1]
        return [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self.layers]

    def next(self, tokens: Tensor, cache: list[Cache], places: Tensor) -> Tensor:
        """Return the most likely token after those at these places, [batch, 1]."""
        return self.head(self.hidden(tokens, cache, places)[:, -1:]).argmax(-1)


class PlainNanochat(nn.Module):
    """RMSNorm without gains, normed queries and keys, relu², an untied head whose logits are bounded by 15."""

    angles: Tensor

    def __init__(self, vocab_size: int, length: int, n_layers: int, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, head_dim = n_heads, d_model // n_heads
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.layers: Any = nn.ModuleList(
            nn.ModuleDict(
                {
                    "qkv": nn.Linear(d_model, 3 * d_model, bias=False),
                    "out": nn.Linear(d_model, d_model, bias=False),
                    "up": nn.Linear(d_model, 4 * d_model, bias=False),
                    "down": nn.Linear(4 * d_model, d_model, bias=False),
                }
            )
            for _ in range(n_layers)
        )
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        places = torch.arange(length)[:, None]
        self.register_buffer("angles", places * 10000 ** (-torch.arange(0, head_dim, 2) / head_dim))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        def normed(x: Tensor) -> Tensor:
            return F.rms_norm(x, (x.shape[-1],))

        angles = self.angles[: tokens.shape[1]]
        x = normed(self.tokens(tokens))
        for layer in self.layers:
            q, k, v = (
                part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
                for part in layer["qkv"](normed(x)).chunk(3, dim=-1)
            )
            q, k = normed(turned(q, angles)), normed(turned(k, angles))
            mixed = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
            x = x + layer["out"](mixed.transpose(1, 2).flatten(2))
            x = x + layer["down"](F.relu(layer["up"](normed(x))).square())
        logits = 15 * torch.tanh(self.head(normed(x)).float() / 15)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Return vectors rotated by the angles of their places, halves as pairs."""
    cosines, sines = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1).to(x.dtype)
