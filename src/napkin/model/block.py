"""A Transformer block: attention and a feed-forward layer on the residual stream, with their norms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from napkin.model.attention import (
    DOCUMENTS_ONLY,
    CausalSelfAttention,
    DocumentsOnly,
    ForwardContext,
    PlainAttention,
    SharedAttention,
)
from napkin.model.latent_attention import LatentAttention
from napkin.model.layers import Device, moved
from napkin.model.norm import sum_and_norm

Residual = Float[Tensor, "batch position d_model"]


@dataclass(frozen=True)
class BlockParts:
    """The parts of a block, which makes as many norms as it needs."""

    attention: CausalSelfAttention | LatentAttention | SharedAttention
    feed_forward: nn.Module
    make_norm: Callable[[], nn.Module]
    make_dropout: Callable[[], nn.Module]


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): pre-norm (Xiong et al. 2020).

    With a `device` or `dtype` the parts are moved there.
    """

    output_is_normalized: ClassVar[bool] = False
    """True if the block's output is normalized, so that the head needs no norm before it."""

    def __init__(self, parts: BlockParts, *, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.attention_norm = parts.make_norm()
        self.attention = parts.attention
        self.feed_forward_norm = parts.make_norm()
        self.feed_forward = parts.feed_forward
        self.dropout = parts.make_dropout()
        moved(self, device, dtype)

    @property
    def preparation(self) -> PlainAttention:
        """The `Preparation` that computes, once per step, what blocks of this kind share."""
        return self.attention.attend

    def forward(self, x: Residual, context: ForwardContext | None = None) -> Residual:
        """Apply both layers, each of which reads from the residual stream and adds to it."""
        written = self.dropout(self.attention(self.attention_norm(x), context))
        x, read = sum_and_norm(self.feed_forward_norm, x, written)
        return x + self.dropout(self.feed_forward(read))


class PostNormBlock(Block):
    """norm(x + attention(x)), then norm(x + feed_forward(x)) (Vaswani et al. 2017)."""

    output_is_normalized = True

    def forward(self, x: Residual, context: ForwardContext | None = None) -> Residual:
        _, x = sum_and_norm(self.attention_norm, x, self.dropout(self.attention(x, context)))
        return sum_and_norm(self.feed_forward_norm, x, self.dropout(self.feed_forward(x)))[1]


class ReorderedBlock(Block):
    """x + norm(attention(x)), then x + norm(feed_forward(x)) (OLMo 2, after Liu et al. 2021)."""

    def forward(self, x: Residual, context: ForwardContext | None = None) -> Residual:
        x = x + self.dropout(self.attention_norm(self.attention(x, context)))
        return x + self.dropout(self.feed_forward_norm(self.feed_forward(x)))


class SandwichBlock(Block):
    """x + norm(attention(norm(x))), then the same with feed_forward (Ding et al. 2021; Gemma 2)."""

    def __init__(self, parts: BlockParts, *, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(parts)
        self.attention_output_norm = parts.make_norm()
        self.feed_forward_output_norm = parts.make_norm()
        moved(self, device, dtype)

    def forward(self, x: Residual, context: ForwardContext | None = None) -> Residual:
        written = self.dropout(self.attention_output_norm(self.attention(self.attention_norm(x), context)))
        x, read = sum_and_norm(self.feed_forward_norm, x, written)
        return x + self.dropout(self.feed_forward_output_norm(self.feed_forward(read)))


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + feed_forward(norm(x)), one norm for both (Wang & Komatsuzaki 2021)."""

    output_is_normalized: ClassVar[bool] = False

    def __init__(self, parts: BlockParts, *, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.norm = parts.make_norm()
        self.attention = parts.attention
        self.feed_forward = parts.feed_forward
        self.dropout = parts.make_dropout()
        moved(self, device, dtype)

    @property
    def preparation(self) -> PlainAttention:
        """As of `Block`."""
        return self.attention.attend

    def forward(self, x: Residual, context: ForwardContext | None = None) -> Residual:
        read = self.norm(x)
        return x + self.dropout(self.attention(read, context) + self.feed_forward(read))


class StatefulBlock(nn.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)) if there is such a layer, as in Mamba there is not.

    The mixer carries a state from token to token: one of `napkin.model.state_space`.
    """

    output_is_normalized: ClassVar[bool] = False

    def __init__(
        self,
        mixer: nn.Module,
        feed_forward: nn.Module | None,
        make_norm: Callable[[], nn.Module],
        make_dropout: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.mixer_norm = make_norm()
        self.mixer = mixer
        self.feed_forward_norm = None if feed_forward is None else make_norm()
        self.feed_forward = feed_forward
        self.dropout = make_dropout()

    @property
    def preparation(self) -> DocumentsOnly:
        """As of `Block`."""
        return DOCUMENTS_ONLY

    def forward(self, x: Residual, context: ForwardContext | None = None) -> Residual:
        written = self.dropout(self.mixer(self.mixer_norm(x), context))
        if self.feed_forward is None or self.feed_forward_norm is None:
            return x + written
        x, read = sum_and_norm(self.feed_forward_norm, x, written)
        return x + self.dropout(self.feed_forward(read))


BLOCKS: dict[str, type[Block] | type[ParallelBlock]] = {
    "pre": Block,
    "post": PostNormBlock,
    "sandwich": SandwichBlock,
    "reordered": ReorderedBlock,
    "parallel": ParallelBlock,
}
