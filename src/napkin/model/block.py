"""One layer of the Transformer: attention and a feed-forward layer on the residual stream, and where norms stand."""

from collections.abc import Callable
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from napkin.model.attention import CausalSelfAttention, Shared

Residual = Float[Tensor, "batch position d_model"]


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): pre-norm (Xiong et al. 2020)."""

    ends_normalised: ClassVar[bool] = False
    """Whether what the last block gives needs no norm before the head."""

    def __init__(
        self,
        attention: CausalSelfAttention,
        feed_forward: nn.Module,
        *,
        make_norm: Callable[[], nn.Module],
        make_dropout: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm()
        self.attention = attention
        self.feed_forward_norm = make_norm()
        self.feed_forward = feed_forward
        self.dropout = make_dropout()

    def forward(self, x: Residual, shared: Shared) -> Residual:
        """Read from the residual stream twice, write to it twice."""
        x = x + self.dropout(self.attention(self.attention_norm(x), shared))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class PostNormBlock(Block):
    """norm(x + attention(x)), then norm(x + feed_forward(x)) (Vaswani et al. 2017)."""

    ends_normalised = True

    def forward(self, x: Residual, shared: Shared) -> Residual:
        """Normalise each sum."""
        x = self.attention_norm(x + self.dropout(self.attention(x, shared)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class ReorderedBlock(Block):
    """x + norm(attention(x)), then x + norm(feed_forward(x)) (OLMo 2, after Liu et al. 2021)."""

    def forward(self, x: Residual, shared: Shared) -> Residual:
        """Normalise what is written."""
        x = x + self.dropout(self.attention_norm(self.attention(x, shared)))
        return x + self.dropout(self.feed_forward_norm(self.feed_forward(x)))


class SandwichBlock(Block):
    """x + norm(attention(norm(x))), then the same with feed_forward (Ding et al. 2021; Gemma 2)."""

    def __init__(
        self,
        attention: CausalSelfAttention,
        feed_forward: nn.Module,
        *,
        make_norm: Callable[[], nn.Module],
        make_dropout: Callable[[], nn.Module],
    ) -> None:
        super().__init__(attention, feed_forward, make_norm=make_norm, make_dropout=make_dropout)
        self.attention_output_norm = make_norm()
        self.feed_forward_output_norm = make_norm()

    def forward(self, x: Residual, shared: Shared) -> Residual:
        """Normalise what is read and what is written."""
        x = x + self.dropout(self.attention_output_norm(self.attention(self.attention_norm(x), shared)))
        return x + self.dropout(self.feed_forward_output_norm(self.feed_forward(self.feed_forward_norm(x))))


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + feed_forward(norm(x)), one norm for both (Wang & Komatsuzaki 2021)."""

    ends_normalised: ClassVar[bool] = False

    def __init__(
        self,
        attention: CausalSelfAttention,
        feed_forward: nn.Module,
        *,
        make_norm: Callable[[], nn.Module],
        make_dropout: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.norm = make_norm()
        self.attention = attention
        self.feed_forward = feed_forward
        self.dropout = make_dropout()

    def forward(self, x: Residual, shared: Shared) -> Residual:
        """Read once, write once."""
        read = self.norm(x)
        return x + self.dropout(self.attention(read, shared) + self.feed_forward(read))


BLOCKS: dict[str, type[Block] | type[ParallelBlock]] = {
    "pre": Block,
    "post": PostNormBlock,
    "sandwich": SandwichBlock,
    "reordered": ReorderedBlock,
    "parallel": ParallelBlock,
}
