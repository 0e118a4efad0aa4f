"""A sequence of tokens of which some count: what supervised tuning, preferences and reinforcement learning train on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float32, Int64
from numpy.typing import NDArray

from napkin.errors import NapkinError


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """Tokens, which of them count in the loss, and figures of those that do.

    The first token never counts: nothing comes before it.
    """

    tokens: Int64[np.ndarray, " token"]
    loss_mask: Bool[np.ndarray, " token"]
    values: Mapping[str, Float32[np.ndarray, " counted"]] = field(default_factory=dict)
    """By name, a number for each token that counts: what an objective reads, such as log-probabilities of the sampler,
    or advantages."""

    def __post_init__(self) -> None:
        if not len(self.tokens) or len(self.tokens) != len(self.loss_mask):
            raise NapkinError(
                f"a sequence has {len(self.tokens)} tokens and {len(self.loss_mask)} marks of which count: "
                "give one or more tokens, and a mark for each"
            )
        if self.loss_mask[0]:
            raise NapkinError("the first token of a sequence counts, and nothing predicts it: begin with another")
        for name, values in self.values.items():
            if len(values) != self.n_trained:
                raise NapkinError(
                    f"a sequence has {len(values)} numbers of '{name}' for {self.n_trained} tokens that count: give "
                    "one for each"
                )

    @property
    def n_trained(self) -> int:
        """How many tokens count."""
        return int(self.loss_mask.sum())

    def with_values(self, **values: NDArray[np.float32]) -> "TokenSequence":
        """The same with more figures of the tokens that count."""
        return TokenSequence(self.tokens, self.loss_mask, {**self.values, **values})


Example = tuple[TokenSequence, ...]
"""Sequences that an objective compares with each other, such as a pair: they are never divided among micro-batches or
ranks. Most objectives have units of one."""


def sequence_of(prompt: Sequence[int], answer: Sequence[int]) -> TokenSequence:
    """A prompt, which does not count, and an answer, which does."""
    tokens = np.array([*prompt, *answer], dtype=np.int64)
    loss_mask = np.arange(len(tokens)) >= len(prompt)
    return TokenSequence(tokens, loss_mask)


def prompt_of(sequence: TokenSequence) -> Int64[np.ndarray, " token"]:
    """The tokens before the first that counts."""
    return sequence.tokens[: int(sequence.loss_mask.argmax())]
