"""What a model computes, reads and keeps when it serves: counted from a prefill and a decode step of the real model.

Both are traced on fake tensors, as a training step is. Blocks are alike, so a model with one block less and one with
one block more than it needs to have all kinds give the operators of any depth.
"""

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting.counting import count
from napkin.accounting.ledger import Ledger, Row
from napkin.accounting.rules import kv_cache_bytes_rule
from napkin.hardware.target import CudaTarget
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer

TRACED_TOKENS = 512
"""Of the prompt that is traced: FLOPs of products grow with the tokens, of attention with the pairs of tokens."""
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
    """Count a prefill and a decode step of the model, without allocating it."""
    layers = config.n_dense_layers + 1
    shallow, deep = (_ledgers(dataclasses.replace(config, n_layers=n)) for n in (layers, layers + 1))
    more = config.n_layers - layers

    def whole(figure: str, at: int) -> float:
        """A figure of the model of all layers, from those of two depths."""
        first, second = (_figures(ledgers[at])[figure] for ledgers in (shallow, deep))
        return first + more * (second - first)

    prefill, decode = 0, 1
    numbers = kv_cache_bytes_rule(
        n_layers=config.n_layers,
        n_kv_heads=config.resolved_n_kv_heads,
        head_dim=config.resolved_head_dim,
        context_length=1,
        bytes_per_number=1,
    )
    # A decode step has one token, so that the FLOPs of products are twice the numbers of their matrices.
    return ServiceWork(
        parameters=round(shallow[decode].parameters + more * (deep[decode].parameters - shallow[decode].parameters)),
        n_layers=config.n_layers,
        d_model=config.d_model,
        n_kv_heads=config.resolved_n_kv_heads,
        kv_numbers=numbers,
        window=config.attention_window,
        windowed_share=1 - _full_blocks(config) / config.n_layers,
        block_weights=round(whole("product_flops", decode)) // 2,
        expert_weights=round(whole("expert_flops", decode)) // 2,
        n_experts=config.n_experts,
        experts_per_token=config.experts_per_token if config.n_experts else 0,
        head_weights=round(whole("head_flops", decode)) // 2,
        products=round(whole("products", prefill)),
        # Its query sees one key, its own.
        pair_flops=whole("attention_flops", decode),
        whole_bytes=whole("whole_bytes", prefill) / TRACED_TOKENS,
        divided_bytes=whole("divided_bytes", prefill) / TRACED_TOKENS,
    )


def _ledgers(config: ModelConfig) -> tuple[Ledger, Ledger]:
    """Of a prefill of one sequence, and of a step of one token."""
    return count_forward(config, TRACED_TOKENS), count_forward(config, 1)


def count_forward(config: ModelConfig, tokens: int) -> Ledger:
    """The ledger of a forward pass in bf16 without gradients, of one sequence; the head reads the last position.

    Attention is counted as one kernel, without a window: of the pairs that a window hides, `ServiceWork.pairs` knows.
    """
    config = dataclasses.replace(
        config,
        context_length=max(tokens, config.context_length),
        attention="sdpa",
        attention_softcap=None,
        attention_window=None,
        full_attention_every=None,
    )

    def step(model: nn.Module, ids: Tensor) -> Tensor:
        assert isinstance(model, Transformer)
        with torch.no_grad():
            return model.logits_of(model.hidden(ids)[:, -1:])

    with FakeTensorMode():
        model = Transformer(config, dtype=torch.bfloat16).eval()
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        return count(model, ids, step, target=CudaTarget(), warm_up=0)


def _full_blocks(config: ModelConfig) -> int:
    """Blocks in which a token sees all before it."""
    if config.attention_window is None:
        return config.n_layers
    return config.n_layers // config.full_attention_every if config.full_attention_every else 0


def _figures(ledger: Ledger) -> dict[str, float]:
    """Sums over the rows that the operators of any depth follow from."""
    products = [row for row in ledger.rows if row.contraction and not row.of_activations]
    head = [row for row in products if row.component == "head"]
    blocks = [row for row in products if row.component != "head"]
    elementwise = [row for row in ledger.rows if not row.contraction and row.component != "embedding"]
    return {
        "product_flops": _flops(blocks),
        "expert_flops": _flops(row for row in blocks if ".experts" in row.module),
        "head_flops": _flops(head),
        "attention_flops": ledger.attention_flops,
        "products": len(blocks),
        "whole_bytes": sum(row.bytes_read + row.bytes_written for row in elementwise if row.component in _WHOLE),
        "divided_bytes": sum(row.bytes_read + row.bytes_written for row in elementwise if row.component not in _WHOLE),
    }


def _flops(rows: Iterable[Row]) -> int:
    return sum(row.flops for row in rows)
