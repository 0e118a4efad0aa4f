"""Plain models in torch's own layers: what a user brings, and what published figures are about."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class GPT2(nn.Module):
    """GPT-2 (Radford et al. 2019) with tied embedding and no dropout; returns the loss."""

    def __init__(
        self,
        vocab_size: int = 50257,
        context_length: int = 1024,
        n_layers: int = 12,
        d_model: int = 768,
        n_heads: int = 12,
        *,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(context_length, d_model)
        self.blocks = nn.ModuleList(GPT2Block(d_model, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return _loss(self, x, targets)


class GPT2Block(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.output = nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part, self.n_heads) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.output(_joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Llama(nn.Module):
    """Llama (Touvron et al. 2023) with grouped-query attention and untied head; returns the loss."""

    cosines: Tensor
    sines: Tensor

    def __init__(
        self,
        vocab_size: int = 32000,
        context_length: int = 1024,
        n_layers: int = 12,
        d_model: int = 768,
        n_heads: int = 12,
        n_kv_heads: int = 4,
        d_ff: int = 2048,
        *,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(LlamaBlock(d_model, n_heads, n_kv_heads, d_ff) for _ in range(n_layers))
        self.norm = nn.RMSNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        head_dim = d_model // n_heads
        angles = torch.arange(context_length)[:, None] * 10000 ** (-torch.arange(0, head_dim, 2) / head_dim)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        length = tokens.shape[1]
        return _loss(self, self.tokens(tokens), targets, self.cosines[:length], self.sines[:length])


class LlamaBlock(nn.Module):
    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int, d_ff: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        head_dim = d_model // n_heads
        self.norm1, self.norm2 = nn.RMSNorm(d_model), nn.RMSNorm(d_model)
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key, self.value = (nn.Linear(d_model, n_kv_heads * head_dim, bias=False) for _ in range(2))
        self.output = nn.Linear(d_model, d_model, bias=False)
        self.gate, self.up = (nn.Linear(d_model, d_ff, bias=False) for _ in range(2))
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        h = self.norm1(x)
        q = _rotated(_heads(self.query(h), self.n_heads), cosines, sines)
        k = _rotated(_heads(self.key(h), self.n_kv_heads), cosines, sines)
        v = _heads(self.value(h), self.n_kv_heads)
        x = x + self.output(_joined(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class DeepLinear(nn.Module):
    """Square linear layers without activations, and a head to one output."""

    def __init__(self, d_model: int, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d_model, d_model, bias=False) for _ in range(n_layers))
        self.head = nn.Linear(d_model, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).squeeze(-1)


def _loss(model: GPT2 | Llama, x: Tensor, targets: Tensor, *tables: Tensor) -> Tensor:
    for block in model.blocks:
        x = checkpoint(block, x, *tables, use_reentrant=False) if model.checkpointing else block(x, *tables)
    return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), targets.flatten())


def _heads(x: Tensor, n_heads: int) -> Tensor:
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cosines, sines = cosines.to(x.dtype), sines.to(x.dtype)
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1)
