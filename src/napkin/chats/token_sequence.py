"""A sequence of tokens of which some count: what supervised tuning, preferences and reinforcement learning train on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float32, Int64
from numpy.typing import NDArray

from napkin.errors import NapkinError


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """Tokens, a mask of those that are trained on, and values of those.

    The mask leaves out the first token: nothing comes before it.
    """

    tokens: Int64[np.ndarray, " token"]
    loss_mask: Bool[np.ndarray, " token"]
    values: Mapping[str, Float32[np.ndarray, " counted"]] = field(default_factory=dict)
    """Values that an objective reads, by name: a number for each trained token, such as the sampler's
    log-probabilities, or advantages."""

    def __post_init__(self) -> None:
        if not len(self.tokens) or len(self.tokens) != len(self.loss_mask):
            raise NapkinError(
                f"a sequence has {len(self.tokens)} tokens and {len(self.loss_mask)} marks of a loss mask: "
                "give one or more tokens, and a mark for each"
            )
        if self.loss_mask[0]:
            raise NapkinError("the loss mask has the first token, which nothing predicts: begin with another")
        for name, values in self.values.items():
            if len(values) != self.n_trained:
                raise NapkinError(
                    f"a sequence has {len(values)} numbers of '{name}' for {self.n_trained} trained tokens: give "
                    "one for each"
                )

    @property
    def n_trained(self) -> int:
        return int(self.loss_mask.sum())

    def with_values(self, **values: NDArray[np.float32]) -> "TokenSequence":
        """Add or replace values."""
        return TokenSequence(self.tokens, self.loss_mask, {**self.values, **values})


Example = tuple[TokenSequence, ...]
"""Sequences that an objective compares with each other, such as a pair: they are never divided among micro-batches or
ranks. Most objectives have examples of one."""


def sequence_of(prompt: Sequence[int], completion: Sequence[int]) -> TokenSequence:
    """Join a prompt and its completion; only the completion is trained on."""
    tokens = np.array([*prompt, *completion], dtype=np.int64)
    loss_mask = np.arange(len(tokens)) >= len(prompt)
    return TokenSequence(tokens, loss_mask)


def prompt_of(sequence: TokenSequence) -> Int64[np.ndarray, " token"]:
    """The tokens before the first that is trained on."""
    return sequence.tokens[: int(sequence.loss_mask.argmax())]
