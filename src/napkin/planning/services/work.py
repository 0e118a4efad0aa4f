"""What a model computes, reads and keeps when it serves: counted from a prefill and a decode step of the real model.

Both are traced on fake tensors through the model's KV cache, as a training step is. Blocks are alike, so two models,
the shallowest that has all kinds of blocks and one with a block more, give the operators of any depth.
"""

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting.counting import count
from napkin.accounting.ledger import Ledger, Row
from napkin.hardware.target import CudaTarget
from napkin.model.config import ModelConfig
from napkin.model.kv_cache import ContiguousCache
from napkin.model.transformer import Transformer

TRACED_TOKENS = 512
"""Of the prompt that is traced, and held in the cache of the longer of two decode steps: FLOPs of products grow with
the tokens, of attention with the pairs of tokens, and what a decode step reads with the tokens in the cache."""
_BYTES = 2
"""Of a number in bf16."""
_WHOLE = ("norms", "other")
"""Components whose elementwise operators each rank of tensor computes in full: norms and the residual stream."""


@dataclass(frozen=True)
class ServiceWork:
    """Of one model, for any prompt and any number of sequences."""

    parameters: int
    n_layers: int
    d_model: int
    n_kv_heads: int
    kv_numbers: int
    """Numbers that one token leaves in the cache, in all layers."""
    window: int | None
    """Most tokens of a sequence that a block with a window keeps; None is all."""
    windowed_share: float
    """Fraction of the blocks that have the window."""
    block_weights: int
    """Numbers in the matrices of all blocks that a token is multiplied with."""
    expert_weights: int
    """Those of them in routed experts."""
    n_experts: int
    experts_per_token: int
    head_weights: int
    """Numbers in the output head, which only the last position of a prompt is multiplied with."""
    products: int
    """Matrix products with weights in a step, the head's left out."""
    pair_flops: float
    """FLOPs of attention per pair of a query and a key that it sees, in all layers."""
    whole_bytes: float
    """Bytes per token that unfused elementwise operators read and write, of norms and the residual stream."""
    divided_bytes: float
    """The same within attention and feed-forward layers, which ranks of tensor divide."""

    def pairs(self, tokens: float) -> float:
        """Pairs of a query and a key that a causal mask leaves of a prompt; the mean of blocks with and without the
        window."""
        everything = tokens * (tokens + 1) / 2
        if self.window is None or tokens <= self.window:
            return everything
        seen = self.window * (self.window + 1) / 2 + (tokens - self.window) * self.window
        return self.windowed_share * seen + (1 - self.windowed_share) * everything

    def kept(self, context: float) -> float:
        """Tokens in the cache of a sequence of so many tokens; the mean of blocks with and without the window."""
        if self.window is None:
            return context
        return self.windowed_share * min(context, self.window) + (1 - self.windowed_share) * context

    def prefill_flops(self, tokens: float) -> float:
        """FLOPs of a prompt: all positions through the blocks, the last through the head."""
        return 2 * self.block_weights * tokens + 2 * self.head_weights + self.pair_flops * self.pairs(tokens)

    def decode_flops(self, sequences: float, context: float) -> float:
        """FLOPs of one token of each sequence, with so many in the cache."""
        per_token = 2 * (self.block_weights + self.head_weights) + self.pair_flops * self.kept(context)
        return sequences * per_token

    def weights_read(self, tokens: float) -> float:
        """Numbers of the blocks' matrices that a step of so many tokens reads: of experts, those that any token chose,
        if each is as likely as another."""
        if not self.n_experts:
            return float(self.block_weights)
        all_experts = self.expert_weights * self.n_experts / self.experts_per_token
        chosen = 1 - (1 - self.experts_per_token / self.n_experts) ** max(1.0, tokens)
        return self.block_weights - self.expert_weights + all_experts * chosen


@functools.lru_cache(maxsize=16)
def count_work(config: ModelConfig) -> ServiceWork:
    """Count a prefill and two decode steps of the model, without allocating it."""
    layers = config.n_dense_layers + 1
    shallow, deep = (_figures(dataclasses.replace(config, n_layers=n)) for n in (layers, layers + 1))
    more = config.n_layers - layers
    # A figure of the model of all layers, from those of two depths.
    whole = _Figures(*(first + more * (second - first) for first, second in zip(shallow, deep, strict=True)))
    return ServiceWork(
        parameters=round(whole.parameters),
        n_layers=config.n_layers,
        d_model=config.d_model,
        n_kv_heads=config.resolved_n_kv_heads,
        kv_numbers=round(whole.kv_bytes) // _BYTES,
        window=config.attention_window,
        windowed_share=sum(window is not None for window in config.attention_windows) / config.n_layers,
        # A decode step has one token, so that the FLOPs of products are twice the numbers of their matrices.
        block_weights=round(whole.block_flops) // 2,
        expert_weights=round(whole.expert_flops) // 2,
        n_experts=config.n_experts,
        experts_per_token=config.experts_per_token if config.n_experts else 0,
        head_weights=round(whole.head_flops) // 2,
        products=round(whole.products),
        pair_flops=whole.pair_flops,
        whole_bytes=whole.whole_bytes,
        divided_bytes=whole.divided_bytes,
    )


class _Figures(NamedTuple):
    """What is counted of a model of some depth; each grows evenly with the blocks."""

    parameters: float
    block_flops: float
    expert_flops: float
    head_flops: float
    products: float
    pair_flops: float
    kv_bytes: float
    whole_bytes: float
    divided_bytes: float


def _figures(config: ModelConfig) -> _Figures:
    prefill, short, long = (
        count_forward(config, new, held) for new, held in ((TRACED_TOKENS, 0), (1, 0), (1, TRACED_TOKENS))
    )
    products = [row for row in short.rows if row.contraction and not row.of_activations]
    head = [row for row in products if row.component == "head"]
    blocks = [row for row in products if row.component != "head"]
    elementwise = [row for row in prefill.rows if not row.contraction and row.component != "embedding"]
    return _Figures(
        parameters=short.parameters,
        block_flops=_flops(blocks),
        expert_flops=_flops(row for row in blocks if ".experts" in row.module),
        head_flops=_flops(head),
        products=len(blocks),
        pair_flops=(long.attention_flops - short.attention_flops) / TRACED_TOKENS,
        kv_bytes=(_attention_bytes(long) - _attention_bytes(short)) / TRACED_TOKENS,
        whole_bytes=_touched(row for row in elementwise if row.component in _WHOLE) / TRACED_TOKENS,
        divided_bytes=_touched(row for row in elementwise if row.component not in _WHOLE) / TRACED_TOKENS,
    )


def count_forward(config: ModelConfig, new: int, held: int = 0) -> Ledger:
    """The ledger of a forward pass in bf16 without gradients, over `new` tokens of a sequence of which the cache holds
    `held`; the head reads the last position.

    Attention is counted as one kernel, without a window: what a window leaves of pairs and cache, `ServiceWork` knows.
    """
    config = dataclasses.replace(
        config,
        context_length=max(new + held, config.context_length),
        attention="sdpa",
        attention_softcap=None,
        attention_window=None,
        full_attention_every=None,
        # Its mask, too, is a part of a server's kernel.
        positions="none" if config.positions == "alibi" else config.positions,
    )

    def step(model: nn.Module, ids: Tensor) -> Tensor:
        assert isinstance(model, Transformer)
        cache.lengths = [held]
        with torch.no_grad():
            return model.logits_of(model.hidden(ids, cache=cache.extend(new))[:, -1:])

    with FakeTensorMode():
        model = Transformer(config, dtype=torch.bfloat16).eval()
        cache = ContiguousCache(config, capacity=new + held, dtype=torch.bfloat16)
        ids = torch.zeros(1, new, dtype=torch.int64)
        return count(model, ids, step, target=CudaTarget(), warm_up=0)


def _attention_bytes(ledger: Ledger) -> int:
    """Bytes that fused attention reads."""
    return sum(row.bytes_read for row in ledger.rows if row.is_fused_attention)


def _touched(rows: Iterable[Row]) -> int:
    return sum(row.bytes_read + row.bytes_written for row in rows)


def _flops(rows: Iterable[Row]) -> int:
    return sum(row.flops for row in rows)
