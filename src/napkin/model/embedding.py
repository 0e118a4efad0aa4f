"""The embedding: one row of a matrix per token id."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.model.initialization import Device, truncated_normal


class Embedding(nn.Module):
    """A learned vector for each of vocab_size ids, initialized truncated-normal at ±3 std."""

    weight: Float[Tensor, "vocab_size d_model"]

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        std: float = 1.0,
        generator: torch.Generator | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = truncated_normal(vocab_size, d_model, std=std, generator=generator, device=device, dtype=dtype)
        self.look_up: Callable[[Tensor, Tensor], Tensor] = F.embedding
        """Takes rows of the matrix; tensor parallelism replaces it."""

    def forward(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        """Look up each id; an id outside the vocabulary is an IndexError on the CPU, an assert on a GPU."""
        return self.look_up(tokens, self.weight)
