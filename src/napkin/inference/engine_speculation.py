"""Proposals for the sequences of an engine, by a draft model whose keys and values are in the same blocks or looked up.

The draft computes every token that the model computes, in the same places, so what both hold of a sequence is always
equally long, and a prefix that sequences share is shared in both. What is drawn is what `speculate` draws of one
sequence: a function of the tokens before it, the request's settings and its number, and neither of how many tokens are
proposed nor of what else is running.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from napkin.errors import NapkinError
from napkin.inference.decoding_graphs import DecodingGraphs
from napkin.inference.paged_cache import KVFormat, PagedCache
from napkin.inference.sampling import distributions, draw
from napkin.inference.settings import MOST_PROPOSED, Sampling
from napkin.inference.speculation import Acceptance, PassSeconds, drawn_proposals, modified_rejection
from napkin.model.feed_forward import CapacityExperts
from napkin.model.kv_cache import bucket_of, power_of_two
from napkin.model.transformer import Transformer
from napkin.tensors import sent_to


@dataclass
class Proposals:
    """The tokens that a draft has drawn to follow a sequence, one more than the model tests."""

    tokens: Sequence[int]
    """The sequence's tokens before any proposal."""
    table: Sequence[int]
    """The sequence's blocks, which have room for all proposals but the last."""
    n_tested: int
    sampling: Sampling
    number: int
    """Number of tokens drawn for the sequence so far."""
    drawn: list[int] = field(default_factory=list)
    rows: list[Float[Tensor, " vocab_size"]] = field(default_factory=list)
    """The probabilities with which each was drawn; none at temperature 0."""

    @property
    def tested(self) -> list[int]:
        """The tokens that the model is to test."""
        return self.drawn[: self.n_tested]

    @property
    def decides(self) -> bool:
        """True where `modified_rejection` draws the model's tokens; at temperature 0 they are drawn as without."""
        return self.sampling.temperature > 0

    def before(self, place: int) -> Sequence[int]:
        """The tokens before a proposal; only repetition_penalty reads them."""
        return [*self.tokens, *self.drawn[:place]] if self.sampling.repetition_penalty != 1 else self.tokens


class PagedDraft:
    """A draft model and its keys and values, in blocks that are numbered as those of the model it drafts for.

    Raises NapkinError for a model that cannot draft for `target`.
    """

    def __init__(self, model: Transformer, target: Transformer, n_blocks: int, block_size: int, kv: KVFormat) -> None:
        own, others = model.config, target.config
        if own.vocab_size != others.vocab_size:
            raise NapkinError(
                f"the draft model has {own.vocab_size:,} tokens, the model {others.vocab_size:,}: "
                "use a draft model with the same tokenizer"
            )
        if own.context_length < others.context_length:
            raise NapkinError(
                f"the draft model has a context of {own.context_length:,} tokens, the model {others.context_length:,}: "
                "use a draft model with at least as many"
            )
        refuse_unfit(model, "the draft model")
        self.model = model.eval()
        self.cache = PagedCache(own, n_blocks, block_size, dtype=model.dtype, device=model.device, kv=kv)
        self.graphs = DecodingGraphs(model, self.cache)

    def extend(
        self, tables: Sequence[Sequence[int]], lengths: Sequence[int], new: Sequence[Sequence[int]]
    ) -> tuple[Float[Tensor, "sequence vocab_size"], Tensor]:
        """Compute new tokens of sequences, equally many of each: the logits after the last, and True, as a tensor, if
        they are finite, whatever a later sequence may see of them. They last until the next call."""
        n_new = len(new[0])
        if n_new == 1:
            replayed = self.graphs.step([each[0] for each in new], tables, lengths)
            if replayed is not None:
                return replayed
        padding = [0] * (bucket_of(n_new, self.cache.device) - n_new)
        tokens = torch.tensor([[*each, *padding] for each in new])
        extending = self.cache.extend(tables, lengths, [n_new] * len(new), tokens.shape[1])
        hidden = self.model.hidden(sent_to(self.cache.device, tokens), cache=extending)[:, :n_new]
        return self.model.logits_of(hidden[:, -1:])[:, 0].float(), hidden.isfinite().all()

    def propose(self, proposals: Sequence[Proposals], logits: Float[Tensor, "sequence vocab_size"]) -> Tensor:
        """Draw proposals for sequences of which all tokens are computed, and compute those to be tested; `logits` are
        those after the last token. True, as a tensor, if all was finite."""
        active, finite = list(proposals), torch.ones((), dtype=torch.bool, device=logits.device)
        for place in range(MOST_PROPOSED + 1):
            self._draw_one(active, logits, place)
            further = [each for each in active if place < each.n_tested]
            if not further:
                break
            active = further
            lengths = [len(each.tokens) + place for each in active]
            new = [[each.drawn[place]] for each in active]
            logits, proposed = self.extend([each.table for each in active], lengths, new)
            finite = finite & proposed
        return finite

    def _draw_one(self, proposals: Sequence[Proposals], logits: Tensor, place: int) -> None:
        for decides in (False, True):
            chosen = [row for row, each in enumerate(proposals) if each.decides is decides]
            if not chosen:
                continue
            of = [proposals[row] for row in chosen]
            settings = [replace(each.sampling, logprobs=None) for each in of]
            numbers, histories = [each.number + place for each in of], [each.before(place) for each in of]
            if decides:
                rows = distributions(logits[chosen], settings, histories)
                drawn = drawn_proposals(rows, settings, numbers)
                for each, row in zip(of, rows, strict=True):
                    each.rows.append(row)
            else:
                drawn = [each.token for each in draw(logits[chosen], settings, numbers, histories)]
            for each, token in zip(of, drawn, strict=True):
                each.drawn.append(token)


def tokens_decided(
    proposals: Sequence[Proposals], logits: Float[Tensor, "row vocab_size"]
) -> tuple[list[int], list[float]]:
    """The model's tokens where a draft proposed others, and the logarithms of the probabilities with which the model
    draws them; `logits` are the model's, n_tested + 1 rows of each sequence."""
    pairs = [(each, place) for each in proposals for place in range(each.n_tested + 1)]
    settings, numbers = [each.sampling for each, _ in pairs], [each.number + place for each, place in pairs]
    wanted = distributions(logits, settings, [each.before(place) for each, place in pairs])
    drafted = torch.stack([each.rows[place] for each, place in pairs]).to(wanted.device)
    tokens = modified_rejection(wanted, drafted, [each.drawn[place] for each, place in pairs], settings, numbers)
    chosen = torch.tensor(tokens, device=wanted.device)[:, None]
    return tokens, wanted.gather(1, chosen)[:, 0].log().tolist()


class ProposalPlanner:
    """Chooses how many tokens are proposed for a sequence: `proposed`, or the fastest number by the request's
    acceptance rate and the seconds of passes over about as many sequences."""

    def __init__(self, proposed: int | None, *, drafts: bool) -> None:
        self.proposed, self.drafts = proposed, drafts
        self.all = Acceptance()
        """The acceptance of all requests together."""
        self._costs: dict[int, PassSeconds] = {}

    def next_proposed(self, n_sequences: int, acceptance: Acceptance) -> int:
        """Tokens to propose for one of this many sequences."""
        if self.proposed is not None:
            return self.proposed
        return self._costs_of(n_sequences).next_proposed(acceptance.believed)

    def add(self, n_sequences: int, proposed: int, draft_seconds: float, target_seconds: float) -> None:
        """Take in a pass for which up to `proposed` tokens of each sequence were proposed."""
        if self.drafts:
            # A draft computes one token more, which is a part of each pass whatever it proposes.
            each = draft_seconds / (proposed + 1)
            draft_seconds, target_seconds = each * proposed, target_seconds + each
        self._costs_of(n_sequences).add(proposed, draft_seconds, target_seconds)

    def _costs_of(self, n_sequences: int) -> PassSeconds:
        return self._costs.setdefault(power_of_two(n_sequences), PassSeconds())


def refuse_unfit(model: Transformer, name: str) -> None:
    """Raise NapkinError for a model that cannot compute several tokens at once and take some of them back."""
    if model.config.has_states:
        raise NapkinError(
            f"{name} has layers that carry a state (mixers is '{model.config.mixers}'), which takes no token back: "
            "serve it without a draft or a lookup"
        )
    if any(isinstance(module, CapacityExperts) for module in model.modules()):
        raise NapkinError(
            f"{name} has experts with a capacity, for which tokens that are computed together compete: "
            "serve it without a draft or a lookup"
        )
