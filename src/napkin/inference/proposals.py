"""Tokens proposed for one pass of a model: by a smaller model, or by what followed the same tokens before."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from napkin.errors import NapkinError
from napkin.inference.generation import cache_for, kept_tokens, last_logits
from napkin.inference.sampling import distributions, draw, inverted, uniform
from napkin.inference.settings import MOST_PROPOSED, Sampling
from napkin.model.transformer import Transformer

_PROPOSAL, _ACCEPTANCE, _RESIDUAL = 1, 2, 3
"""Streams of a seed's uniform numbers; stream 0 draws where nothing is proposed."""

_LONGEST_INDEXED = 3
_MOST_COMPARED = 32


@runtime_checkable
class Proposer(Protocol):
    """What proposes tokens for the target to test."""

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling, number: int) -> list[int]:
        """Up to n tokens that may follow `tokens`, of which `number` were drawn; 0 begins another text."""
        ...

    def draws_alone(self, sampling: Sampling) -> bool:
        """Whether each token is what the target draws without proposals; `token` is then not asked."""
        ...

    def token(self, place: int, tokens: Sequence[int], row: Tensor, sampling: Sampling, number: int) -> int:
        """The token that follows `tokens`, where `place` proposals were accepted since `propose`.

        It is the proposed one, if that is accepted. `row` has the target's logits [1, vocab_size].
        """
        ...

    @property
    def seconds(self) -> float:
        """Seconds that proposing has taken, in all."""
        ...


class PromptLookup:
    """Proposes what followed the last tokens where they occurred before, most recently (Saxena 2023).

    The longest suffix counts that occurred, of at most `longest` tokens. A proposal is certain of its token, so testing
    it against a draw of the target is modified rejection sampling; the text is therefore the same as without proposals.
    Of three tokens that occur very often, only the newest occurrences are compared.
    """

    def __init__(self, longest: int = 16) -> None:
        if longest < 1:
            raise NapkinError(f"the longest suffix to look up is {longest} tokens: use 1 or more")
        self.longest = longest
        self.seconds = 0.0
        self._tokens: list[int] = []
        # For each n-gram of one to three tokens where its newest occurrences end.
        self._ends: dict[tuple[int, ...], deque[int]] = {}

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling, number: int) -> list[int]:
        """See `Proposer`; none where even the last token is new."""
        started = time.perf_counter()
        self._index(tokens)
        found: list[int] = []
        for size in range(min(self.longest, _LONGEST_INDEXED, len(tokens) - 1), 0, -1):
            *before, _ = self._ends[tuple(self._tokens[-size:])]
            if before:
                # Of equally long ones the newest, which is the last.
                end = max(before, key=lambda end: (self._common_suffix(end), end))
                found = self._tokens[end : end + n]
                break
        self.seconds += time.perf_counter() - started
        return found

    def draws_alone(self, sampling: Sampling) -> bool:
        """Always."""
        return True

    def token(self, place: int, tokens: Sequence[int], row: Tensor, sampling: Sampling, number: int) -> int:
        """What the target draws without proposals."""
        return draw(row, [sampling], [number], [tokens])[0].token

    def _common_suffix(self, end: int) -> int:
        """How many of the last tokens also stand before `end`, of those that count."""
        tokens, size, last = self._tokens, 0, len(self._tokens)
        while size < min(self.longest, end) and tokens[end - 1 - size] == tokens[last - 1 - size]:
            size += 1
        return size

    def _index(self, tokens: Sequence[int]) -> None:
        if self._tokens != list(tokens[: len(self._tokens)]):
            self._tokens, self._ends = [], {}
        for token in tokens[len(self._tokens) :]:
            self._tokens.append(token)
            end = len(self._tokens)
            for size in range(1, min(self.longest, _LONGEST_INDEXED, end) + 1):
                self._ends.setdefault(tuple(self._tokens[-size:]), deque(maxlen=_MOST_COMPARED)).append(end)


class DraftModel:
    """Proposes what a smaller model of the same vocabulary draws, with the same settings.

    At temperature 0 a proposal is accepted if the target takes the same token. Otherwise `modified_rejection` decides,
    of every token: where all proposals were accepted, the draft draws one more. So a token is a function of the tokens
    before it, the settings and its number, and not of how many were proposed at a time.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.seconds = 0.0
        self._cached: CachedTokens | None = None
        self._proposed: list[int] = []
        self._rows: list[Tensor] = []

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling, number: int) -> list[int]:
        """See `Proposer`."""
        started = time.perf_counter()
        if number == 0:
            self._cached = None
        self._proposed, self._rows = [], []
        for place in range(n):
            self._propose_one([*tokens, *self._proposed], sampling, number + place)
        self.seconds += time.perf_counter() - started
        return list(self._proposed)

    def draws_alone(self, sampling: Sampling) -> bool:
        """At temperature 0."""
        return sampling.temperature == 0

    def token(self, place: int, tokens: Sequence[int], row: Tensor, sampling: Sampling, number: int) -> int:
        """Accept the proposal, or draw another token. Raises NapkinError where the two models' vocabularies differ."""
        if row.shape[-1] != self.model.config.vocab_size:
            raise NapkinError(
                f"the draft model has {self.model.config.vocab_size:,} tokens, the model {row.shape[-1]:,}: "
                "use a draft model with the same tokenizer"
            )
        if place == len(self._proposed):
            started = time.perf_counter()
            self._propose_one(tokens, sampling, number)
            self.seconds += time.perf_counter() - started
        wanted = distributions(row, [sampling], [tokens])[0]
        return modified_rejection(wanted, self._rows[place].to(wanted.device), self._proposed[place], sampling, number)

    def _propose_one(self, tokens: Sequence[int], sampling: Sampling, number: int) -> None:
        if self._cached is None:
            self._cached = CachedTokens(self.model, self.model.config.context_length)
        logits = self._cached.logits(tokens, 1)
        if sampling.temperature == 0:
            self._proposed.append(draw(logits, [sampling], [number], [tokens])[0].token)
            return
        row = distributions(logits, [sampling], [tokens])
        self._rows.append(row[0])
        self._proposed.append(int(inverted(row, [uniform(sampling.seed, number, _PROPOSAL)])))


def modified_rejection(target: Tensor, draft: Tensor, proposed: int, sampling: Sampling, number: int) -> int:
    """A token distributed as `target`, of one that was drawn from `draft`; both have the probabilities of all tokens.

    The proposed token x is accepted with probability target(x) / draft(x), at most 1; else one is drawn from the
    normalized max(0, target - draft), which has none of x (Leviathan et al. 2023, section 2.3).
    """
    if uniform(sampling.seed, number, _ACCEPTANCE) * float(draft[proposed]) < float(target[proposed]):
        return proposed
    residual = (target - draft).clamp(min=0)
    # Rounding may leave nothing of two equal distributions.
    residual = target if not bool(residual.any()) else residual
    return int(inverted(residual[None], [uniform(sampling.seed, number, _RESIDUAL)]))


class CachedTokens:
    """A model and the tokens of one sequence that it has seen; a wrong end is forgotten and seen again."""

    def __init__(self, model: Transformer, capacity: int) -> None:
        self.model = model
        self.limit = model.config.context_length
        self.first: int | None = None
        """The oldest token in sight: a function of the tokens at first and of how many they are."""
        self._cache = cache_for(model, 1, min(capacity, self.limit), slack=MOST_PROPOSED + 1)
        self._seen: list[int] = []
        self._oldest = 0

    def make_room(self, tokens: Sequence[int]) -> int:
        """Let the oldest tokens fall out of sight where the context is full, as `continue_prompt` does; how many more
        fit."""
        if self.first is None:
            self._oldest = self.first = max(0, len(tokens) - self.limit)
        step = self.limit + 1 - kept_tokens(self.limit)
        beyond = len(tokens) - self._oldest - self.limit
        first = self._oldest + max(0, -(-beyond // step)) * step
        if first != self.first:
            self.first, self._seen = first, []
            self._cache.truncate(0)
        return self.limit - (len(tokens) - first)

    def logits(self, tokens: Sequence[int], n_last: int, **how: int) -> Tensor:
        """The logits after each of the last `n_last` of `tokens`, [n_last, vocab_size]; others than these are kept."""
        self.make_room(tokens)
        visible = list(tokens[self.first :])
        # What is kept is the common beginning, short of those whose logits are wanted.
        same = min(len(self._seen), len(visible) - n_last)
        while self._seen[:same] != visible[:same]:
            same -= 1
        self._cache.truncate(same)
        same = self._cache.lengths[0]
        logits = last_logits(self.model, visible[same:], self._cache, n_last, **how)
        self._seen = visible
        return logits
