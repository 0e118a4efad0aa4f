"""Forms of softmax attention: the same numbers, computed in different ways.

A form's `prepare` makes, once per step, what all layers share: which pairs meet, and what is added to their scores. A
call then mixes the values of one layer. Query head h reads key and value head h // (n_heads / n_kv_heads).
"""

import functools
from collections.abc import Callable
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from napkin.model.plain_attention import plain_attention
from napkin.model.position import NoPositions
from napkin.model.visibility import Causal, additive_mask
from napkin.torch_compile import set_up_compiler

Queries = Float[Tensor, "batch heads position head_dim"]
Keys = Float[Tensor, "batch kv_heads position head_dim"]
Documents = Int[Tensor, "batch position"] | None


class PlainAttention:
    """softmax(cap(q · kᵀ · scale) + mask) · v, as it is written; it holds the scores of all pairs.

    Scores and weights have the format of queries and keys; the softmax sums in fp32.
    """

    def __init__(
        self, n_heads: int, *, scale: float, sees: Causal, cap: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.n_heads = n_heads
        self.scale = scale
        self.sees = sees
        self.cap = cap or _as_it_is

    def prepare(self, positions: NoPositions, length: int, documents: Documents, device: torch.device) -> Any:
        """The mask."""
        return additive_mask(self.sees, positions, self.n_heads, length, documents, device)

    def __call__(self, queries: Queries, keys: Keys, values: Keys, prepared: Any) -> Queries:
        """Mix the values by their weights; the group of queries that share a key is one matrix."""
        if self.cap is _as_it_is:
            return plain_attention(queries, keys, values, prepared, self.scale)
        batch, n_kv_heads, length, head_dim = keys.shape
        grouped = (queries * self.scale).reshape(batch, n_kv_heads, -1, head_dim)
        scores = self.cap(grouped @ keys.transpose(-2, -1)).view(batch, self.n_heads, length, length)
        # In place: scores are the largest tensors of a small model, and nothing wants them without the mask.
        weights = scores.add_(prepared.to(scores.dtype)).softmax(dim=-1)
        return (weights.view(batch, n_kv_heads, -1, length) @ values).view(queries.shape)


class FusedAttention:
    """torch's scaled_dot_product_attention, causal: it holds no scores."""

    def __init__(self, n_heads: int, *, scale: float, sees: Causal) -> None:
        self.n_heads = n_heads
        self.scale = scale
        self.sees = sees

    def prepare(self, positions: NoPositions, length: int, documents: Documents, device: torch.device) -> Any:
        """A mask where there are documents to be told apart, else nothing."""
        if documents is None:
            return None
        return additive_mask(self.sees, positions, self.n_heads, length, documents, device)

    def __call__(self, queries: Queries, keys: Keys, values: Keys, prepared: Any) -> Queries:
        """Mix the values by their weights."""
        return F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=None if prepared is None else prepared.to(queries.dtype),
            is_causal=prepared is None,
            scale=self.scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )


class MaskedFusedAttention(FusedAttention):
    """The same for windows and biased scores: with a mask over all pairs, whatever it hides."""

    def prepare(self, positions: NoPositions, length: int, documents: Documents, device: torch.device) -> Any:
        """The mask."""
        return additive_mask(self.sees, positions, self.n_heads, length, documents, device)


class FlexAttention(PlainAttention):
    """torch's flex_attention, compiled for a GPU: it holds no scores and skips blocks of pairs that never meet.

    A CPU has no backward pass of it: there this is the plain form.
    """

    def prepare(self, positions: NoPositions, length: int, documents: Documents, device: torch.device) -> Any:
        """The blocks of pairs that meet, and what becomes of their scores; on a CPU the mask."""
        if device.type == "cpu":
            return super().prepare(positions, length, documents, device)
        return self.prepare_kernel(positions, length, documents, device)

    def __call__(self, queries: Queries, keys: Keys, values: Keys, prepared: Any) -> Queries:
        """Mix the values by their weights."""
        if isinstance(prepared, Tensor):
            return super().__call__(queries, keys, values, prepared)
        return self.call_kernel(_compiled_flex(), queries, keys, values, prepared)

    def prepare_kernel(self, positions: NoPositions, length: int, documents: Documents, device: torch.device) -> Any:
        """The rules as functions of one pair, which the compiler builds into its kernel."""
        from torch.nn.attention.flex_attention import create_block_mask

        # What the compiler reads nothing may be wrapped around, not even the checks of types while tests run.
        @no_type_check
        def change(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return self.cap(score) + positions.bias(head, query - key)

        @no_type_check
        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return self.sees(query, key)

        @no_type_check
        def sees_in_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            assert documents is not None
            return self.sees(query, key) & (documents[batch, query] == documents[batch, key])

        n_batches = None if documents is None else len(documents)
        rule = sees if documents is None else sees_in_document
        return change, create_block_mask(rule, n_batches, None, length, length, device=device)

    def call_kernel(
        self, kernel: Callable[..., Tensor], queries: Queries, keys: Keys, values: Keys, prepared: Any
    ) -> Queries:
        """Run `flex_attention`, compiled or as it is."""
        change, blocks = prepared
        return kernel(
            queries,
            keys,
            values,
            score_mod=change,
            block_mask=blocks,
            scale=self.scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )


class SoftCap:
    """Scores that approach ±cap and never pass it: cap · tanh(score / cap) (Gemma Team 2024)."""

    def __init__(self, cap: float) -> None:
        self.cap = cap

    @no_type_check
    def __call__(self, scores: Tensor) -> Tensor:
        """Cap."""
        return self.cap * torch.tanh(scores / self.cap)


@no_type_check
def _as_it_is(scores: Tensor) -> Tensor:
    return scores


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    set_up_compiler()
    return torch.compile(flex_attention, dynamic=False)
