"""Speculative sampling (Leviathan, Kalman & Matias 2023): several tokens per pass of the model that is to speak.

Something cheap proposes tokens, one pass of the model tests all of them, and those before the first rejected one stay,
with one more that the pass gives anyway. What comes is distributed as if the model had drawn each token alone, under
all settings of `Sampling`; at temperature 0 it is the same tokens, as far as products over several tokens round like
those over one.

What that gains is planned from how often proposals are accepted and from seconds, and metered, by the formulas of
section 3 for proposals that are accepted independently with probability α: of γ of them a pass keeps
(1 - α^(γ+1)) / (1 - α) tokens on average.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from napkin.errors import NapkinError
from napkin.inference.decoding_forms import choose_decoding_forms
from napkin.inference.generation import cache_for, kept_tokens, last_logits
from napkin.inference.sampling import Draw, distributions, draw, inverted, told, uniform
from napkin.inference.settings import MOST_PROPOSED, Sampling
from napkin.model.kernel_forms import use_decoding_kernels
from napkin.model.transformer import Transformer

_FIRST_PROPOSED = 4
_CANDIDATES = (0, 1, 2, 3, 4, 6, 8, 12, MOST_PROPOSED)
_MEMORY = 0.9
"""Weight that the past keeps with each pass: a text changes how well it can be foreseen."""

_FORGOTTEN = 0.99
"""Factor by which measured seconds are discounted with each later pass, so that old measurements are tried again."""

_PROPOSAL, _ACCEPTANCE, _RESIDUAL = 1, 2, 3
"""Streams of a seed's uniform numbers; stream 0 draws where nothing is proposed."""

_LONGEST_INDEXED = 3
_MOST_COMPARED = 32


@runtime_checkable
class Proposer(Protocol):
    """A proposer of tokens that the target tests."""

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling, number: int) -> list[int]:
        """Up to n tokens that may follow `tokens`, of which `number` were drawn; 0 begins another text."""
        ...

    def draws_alone(self, sampling: Sampling) -> bool:
        """True where each token is the one that the target draws without proposals; `token` is then not asked."""
        ...

    def token(self, place: int, tokens: Sequence[int], row: Tensor, sampling: Sampling, number: int) -> int:
        """The token that follows `tokens`, where `place` proposals were accepted since `propose`.

        It is the proposed one, if that is accepted. `row` has the target's logits [1, vocab_size].
        """
        ...

    @property
    def seconds(self) -> float:
        """Total seconds spent on proposing."""
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
        # For each n-gram of one to three tokens, where its newest occurrences end.
        self._ends: dict[tuple[int, ...], deque[int]] = {}

    def propose(self, tokens: Sequence[int], n: int, sampling: Sampling, number: int) -> list[int]:
        """See `Proposer`; none where even the last token is new."""
        started = time.perf_counter()
        self._index(tokens)
        proposal: list[int] = []
        for size in range(min(self.longest, _LONGEST_INDEXED, len(tokens) - 1), 0, -1):
            *before, _ = self._ends[tuple(self._tokens[-size:])]
            if before:
                # Among equally long matches the newest, which is the last.
                end = max(before, key=lambda end: (self._common_suffix(end), end))
                followed = self._tokens[end : end + n]
                # Text that repeats is assumed to keep repeating.
                proposal = [followed[place % len(followed)] for place in range(n)]
                break
        self.seconds += time.perf_counter() - started
        return proposal

    def draws_alone(self, sampling: Sampling) -> bool:
        """Always."""
        return True

    def token(self, place: int, tokens: Sequence[int], row: Tensor, sampling: Sampling, number: int) -> int:
        """Return the token that the target draws without proposals."""
        return draw(row, [sampling], [number], [tokens])[0].token

    def _common_suffix(self, end: int) -> int:
        """Return the length of the suffix that also stands before `end`."""
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
        """True at temperature 0, where the target draws the same token with or without proposals."""
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
        wanted = distributions(row, [sampling], [tokens])
        drafted = self._rows[place][None].to(wanted.device)
        return modified_rejection(wanted, drafted, [self._proposed[place]], [sampling], [number])[0]

    def _propose_one(self, tokens: Sequence[int], sampling: Sampling, number: int) -> None:
        if self._cached is None:
            self._cached = CachedTokens(self.model, self.model.config.context_length)
        logits = self._cached.logits(tokens, 1)
        if sampling.temperature == 0:
            self._proposed.append(draw(logits, [sampling], [number], [tokens])[0].token)
            return
        row = distributions(logits, [sampling], [tokens])
        self._rows.append(row[0])
        self._proposed += drawn_proposals(row, [sampling], [number])


def drawn_proposals(
    draft: Float[Tensor, "row vocab_size"], settings: Sequence[Sampling], numbers: Sequence[int]
) -> list[int]:
    """A proposal for each row, drawn from its probabilities; `numbers` as in `draw`."""
    return inverted(draft, _uniforms(settings, numbers, _PROPOSAL)).tolist()


def modified_rejection(
    target: Float[Tensor, "row vocab_size"],
    draft: Float[Tensor, "row vocab_size"],
    proposed: Sequence[int],
    settings: Sequence[Sampling],
    numbers: Sequence[int],
) -> list[int]:
    """A token for each row that is distributed as `target`, of one that was drawn from `draft`; both have the
    probabilities of all tokens.

    The proposed token x is accepted with probability target(x) / draft(x), at most 1; else one is drawn from the
    normalized max(0, target - draft), which has none of x (Leviathan et al. 2023, section 2.3).
    """
    ids = torch.tensor(proposed, device=target.device)[:, None]
    chances = torch.tensor(_uniforms(settings, numbers, _ACCEPTANCE), dtype=target.dtype, device=target.device)
    accepted = chances * draft.gather(1, ids)[:, 0] < target.gather(1, ids)[:, 0]
    residual = (target - draft).clamp(min=0)
    # Rounding may leave nothing of two equal distributions.
    residual = residual.where(residual.any(dim=1, keepdim=True), target)
    others = inverted(residual, _uniforms(settings, numbers, _RESIDUAL))
    return ids[:, 0].where(accepted, others).tolist()


def _uniforms(settings: Sequence[Sampling], numbers: Sequence[int], stream: int) -> list[float]:
    return [uniform(each.seed, number, stream) for each, number in zip(settings, numbers, strict=True)]


class CachedTokens:
    """A model and the tokens of one sequence that it has seen; a wrong end is forgotten and seen again."""

    def __init__(self, model: Transformer, capacity: int) -> None:
        if not torch.is_autocast_enabled(model.device.type):
            choose_decoding_forms(model)
            use_decoding_kernels(model)
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
        # The common beginning is kept, except for the tokens whose logits are needed.
        same = min(len(self._seen), len(visible) - n_last)
        while self._seen[:same] != visible[:same]:
            same -= 1
        self._cache.truncate(same)
        same = self._cache.lengths[0]
        logits = last_logits(self.model, visible[same:], self._cache, n_last, **how)
        self._seen = visible
        return logits


def speculate(
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    proposer: Proposer,
    *,
    proposed: int | None = None,
    meter: "SpeculationMeter | None" = None,
) -> Iterator[Draw]:
    """Yield up to `max_new_tokens` tokens that continue `prompt`, as `continue_prompt` does.

    `proposed` tokens are proposed for each pass, up to 16; None is as many as the meter plans to be fastest. The text
    does not depend on it.
    """
    if not prompt:
        raise NapkinError("the prompt holds no token: begin with a separator or with text")
    if proposed is not None and not 0 <= proposed <= MOST_PROPOSED:
        raise NapkinError(f"{proposed} tokens are to be proposed for each pass: use 0 to {MOST_PROPOSED}")
    meter = SpeculationMeter() if meter is None else meter
    tokens, ends = list(prompt), set(sampling.stop_ids)
    target = CachedTokens(model, len(prompt) + max(max_new_tokens, 1))
    number = 0
    while number < max_new_tokens:
        started, drafted_before = time.perf_counter(), proposer.seconds
        wanted = meter.next_proposed() if proposed is None else proposed
        most = min(wanted, target.make_room(tokens), max_new_tokens - number - 1)
        # The prompt goes through the model by itself, so that the seconds of a pass are those of its tokens.
        proposals = proposer.propose(tokens, most if number else 0, sampling, number)
        asked = time.perf_counter()
        logits = target.logits([*tokens, *proposals], len(proposals) + 1)
        target_seconds = time.perf_counter() - asked
        first = number
        drawn = []
        if proposer.draws_alone(sampling):
            drawn = _drawn_alone(logits, tokens, proposals, sampling, number)
            tokens += [each.token for each in drawn]
            number += len(drawn)
        for place in range(0 if drawn else len(proposals) + 1):
            row = logits[place : place + 1]
            token = proposer.token(place, tokens, row, sampling, number)
            drawn += told(row, [token], [sampling])
            tokens.append(token)
            number += 1
            if token in ends or (place < len(proposals) and token != proposals[place]):
                break
        if first:
            draft_seconds = proposer.seconds - drafted_before
            accepted = sum(each.token == proposal for each, proposal in zip(drawn, proposals, strict=False))
            other = time.perf_counter() - started - draft_seconds - target_seconds
            meter.add(len(proposals), accepted, len(drawn), draft_seconds, target_seconds + other)
        for each in drawn:
            if each.token in ends:
                return
            yield each


def _drawn_alone(
    logits: Tensor, tokens: list[int], proposals: list[int], sampling: Sampling, number: int
) -> list[Draw]:
    """Return the tokens that the target draws alone, up to the first that was not proposed: all rows at once."""
    rows = range(len(proposals) + 1)
    read = sampling.repetition_penalty != 1
    histories = [[*tokens, *proposals[:row]] if read else [] for row in rows]
    drawn = draw(logits, [sampling] * len(rows), [number + row for row in rows], histories)
    same = next((row for row, token in enumerate(proposals) if drawn[row].token != token), len(proposals))
    return drawn[: same + 1]


def expected_tokens(acceptance: float, proposed: int) -> float:
    """Tokens per pass of the target, equation 1: those accepted, and the one that the target draws itself."""
    if acceptance >= 1:
        return proposed + 1
    return (1 - acceptance ** (proposed + 1)) / (1 - acceptance)


def improvement(acceptance: float, proposed: int, draft_cost: float, pass_cost: float = 1.0) -> float:
    """Tokens per second over those without speculation, theorem 3.8.

    `draft_cost` is c, the seconds of a proposal over those of the target's token. `pass_cost` is what a pass of the
    target over `proposed` + 1 tokens takes over one of a single token; the theorem has 1, which holds where reading the
    weights takes all the time.
    """
    return expected_tokens(acceptance, proposed) / (proposed * draft_cost + pass_cost)


def best_proposed(
    acceptance: float, draft_cost: float, pass_cost: Callable[[int], float] = lambda proposed: 1.0
) -> int:
    """The number of proposals with the largest improvement; 0 where none improves."""
    return max(_CANDIDATES, key=lambda n: improvement(acceptance, n, draft_cost, pass_cost(n)))


@dataclass
class Acceptance:
    """The proposals of one request, or of all of them, and how many were accepted."""

    proposed: int = 0
    tested: int = 0
    """Proposals that were accepted or rejected; those after a rejected one are not looked at."""
    accepted: int = 0
    _recent: tuple[float, float] = (0.0, 0.0)

    def count(self, proposed: int, accepted: int) -> None:
        """Count the proposals of one pass."""
        tested = min(accepted + 1, proposed)
        self.proposed += proposed
        self.tested += tested
        self.accepted += accepted
        self._recent = (_MEMORY * self._recent[0] + accepted, _MEMORY * self._recent[1] + tested)

    @property
    def acceptance(self) -> float:
        """α: of the proposals that were tested, the part that was accepted; NaN without any."""
        return self.accepted / self.tested if self.tested else float("nan")

    @property
    def believed(self) -> float:
        """Estimate of α for the next pass. The prior is two proposals, one of them accepted; as the past is discounted,
        proposing is tried again."""
        accepted, tested = self._recent
        return (accepted + 1) / (tested + 2)


@dataclass
class PassSeconds:
    """Metered seconds of passes by how many tokens were proposed for them, and of the proposals themselves."""

    _by_proposed: dict[int, float] = field(default_factory=dict)
    _with_proposals: int = 0
    _without: int = 0
    """Passes with proposals, and without."""
    _last: dict[int, int] = field(default_factory=dict)
    """For each number of proposals, the count of passes with proposals when it was last used."""
    _draft_seconds: float = 0.0
    _drafted: int = 0

    def add(self, proposed: int, draft_seconds: float, target_seconds: float) -> None:
        """Take in one pass over `proposed` + 1 tokens of each sequence."""
        self._drafted += proposed
        self._draft_seconds += draft_seconds
        fastest = self._by_proposed.get(proposed, target_seconds)
        # Near the fastest of them, since other programs' work is not the model's; slowly upwards, as the context grows.
        self._by_proposed[proposed] = min(target_seconds, 1.02 * fastest)
        self._with_proposals, self._without = self._with_proposals + (proposed > 0), self._without + (proposed == 0)
        self._last[proposed] = self._with_proposals

    @property
    def draft_cost(self) -> float:
        """c: the seconds of a proposal over those of the target's pass over one token."""
        return self._draft_seconds / self._drafted / self._seconds_of(0) if self._drafted else 0.0

    @property
    def of_one(self) -> float | None:
        """Seconds of a pass without proposals; None where there was none."""
        return self._by_proposed.get(0)

    def pass_cost(self, proposed: int) -> float:
        """The seconds of a pass over `proposed` + 1 tokens, divided by those of a single token."""
        return self._seconds_of(proposed) / self._seconds_of(0)

    def next_proposed(self, acceptance: float) -> int:
        """Return the number of tokens to propose for the next pass, where proposals are accepted so often."""
        # The first pass of a kind may have loaded or compiled its kernels.
        if self._without < 2:
            return 0  # Measures what a token takes without proposals.
        if self._with_proposals < 2:
            return _FIRST_PROPOSED
        return best_proposed(acceptance, self.draft_cost, self.pass_cost)

    def _seconds_of(self, proposed: int) -> float:
        """Seconds of a pass: as measured, or on the line between measured neighbours."""
        # Old measurements are discounted, so that a number of proposals whose pass other programs slowed down is tried
        # again.
        known = {
            n: seconds * _FORGOTTEN ** (self._with_proposals - self._last[n])
            for n, seconds in self._by_proposed.items()
        }
        if 0 in known:
            known = {n: max(seconds, self._by_proposed[0]) for n, seconds in known.items()}
        below = max((n for n in known if n <= proposed), default=None)
        above = min((n for n in known if n >= proposed), default=None)
        if below is None or above is None:
            # Beyond the measured ones a pass takes as long as the nearest, as where weights are read.
            nearest = above if below is None else below
            return 1.0 if nearest is None else known[nearest]
        if below == above:
            return known[below]
        part = (proposed - below) / (above - below)
        return (1 - part) * known[below] + part * known[above]


@dataclass
class SpeculationMeter(Acceptance):
    """The accepted proposals of a generation, and the seconds of its passes. Plans the next pass by both."""

    passes: int = 0
    """Passes of the target model, without the one over the prompt."""
    tokens: int = 0
    """Tokens that came out of them."""
    seconds: float = 0.0
    """Seconds of these passes and their proposals."""
    costs: PassSeconds = field(default_factory=PassSeconds)

    def add(self, proposed: int, accepted: int, tokens: int, draft_seconds: float, target_seconds: float) -> None:
        """Count one pass over `proposed` + 1 tokens, of which it made `tokens`."""
        self.count(proposed, accepted)
        self.passes += 1
        self.tokens += tokens
        self.seconds += draft_seconds + target_seconds
        self.costs.add(proposed, draft_seconds, target_seconds)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens over passes; NaN without any."""
        return self.tokens / self.passes if self.passes else float("nan")

    def next_proposed(self) -> int:
        """Return the number of tokens to propose for the next pass."""
        return self.costs.next_proposed(self.believed)

    def __str__(self) -> str:
        if not self.passes:
            return "no pass could be saved: fewer than 2 tokens"
        text = f"{self.accepted:,} of {self.tested:,} tested proposals accepted ({self.proposed:,} proposed)"
        metered, gain = self.metered_improvement(), f"planned {self.planned_improvement():.2f} times as fast"
        if metered == metered:
            gain += f", metered {metered:.2f}"
        return f"{self.tokens_per_pass:.2f} tokens per pass of the model; {text}; {gain}"

    def planned_improvement(self) -> float:
        """The speed-up by the formula for the metered α and seconds, at the mean number of proposals."""
        proposed = round(self.proposed / self.passes) if self.passes else 0
        acceptance, costs = self.acceptance if self.tested else 0.0, self.costs
        return improvement(acceptance, proposed, costs.draft_cost, costs.pass_cost(proposed))

    def metered_improvement(self) -> float:
        """Tokens per second over those of passes of a single token; NaN where there was none."""
        of_one = self.costs.of_one
        return float("nan") if of_one is None or not self.seconds else self.tokens * of_one / self.seconds
