"""Log-probabilities of given continuations, each shared beginning computed once.

Sequences with a common beginning form a tree of tokens. The trunk, which all of them share, goes into a KV cache; the
branches go through the model in one pass, each token seeing the trunk and its own ancestors. Where layers carry a
state, each sequence is computed by itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from napkin.errors import NapkinError
from napkin.evaluation.tasks.prompts import common_length
from napkin.inference.generation import PREFILL_CHUNK, cache_for, hidden_states
from napkin.kernels.loss.cross_entropy import target_log_probabilities
from napkin.model.kv_cache import ContiguousCache
from napkin.model.transformer import Transformer, evaluation_mode

BRANCH_TOKENS = 1024
"""Tokens of branches in a pass, which all compute scores with each other: more would waste more than passes cost."""
_ROWS_OF_LOGITS = 128


@dataclass(frozen=True)
class Score:
    """The log-probability of a continuation."""

    logprobs: tuple[float, ...]
    """The log-probability in nats of each of its tokens, given all before it."""
    greedy: bool
    """Whether the model would generate it at temperature 0."""

    @property
    def total(self) -> float:
        """The log-probability of the whole continuation."""
        return sum(self.logprobs)


@dataclass(frozen=True)
class _Sequence:
    """A pair as the model reads it: all tokens but the last; those from `first` on predict the continuation."""

    number: int
    tokens: tuple[int, ...]
    first: int
    targets: tuple[int, ...]


@torch.inference_mode()
def score(
    model: Transformer,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    chunk_size: int = PREFILL_CHUNK,
    branch_tokens: int = BRANCH_TOKENS,
) -> list[Score]:
    """The scores of (context, continuation) pairs of token ids, in their order.

    Where a pair exceeds the model's context length by more than the last token, the context loses its oldest tokens.
    Raises NapkinError for a pair without context, with which the first token has no probability, or with a continuation
    longer than the context length.
    """
    sequences = sorted(
        (_as_read(model.config.context_length, number, *pair) for number, pair in enumerate(pairs)),
        key=lambda each: each.tokens,
    )
    scores: dict[int, Score] = {each.number: Score((), True) for each in sequences if not each.targets}
    sequences = [each for each in sequences if each.targets]
    if sequences:
        cache, held = cache_for(model, 1, max(len(each.tokens) for each in sequences)), ()
        if cache.states is not None:
            scores |= {each.number: _scored_alone(model, cache, each, chunk_size) for each in sequences}
            return [scores[number] for number in range(len(pairs))]
        for group, trunk in _groups(sequences, branch_tokens):
            wanted = group[0].tokens[:trunk]
            cache.truncate(common_length(held, wanted))
            for _ in hidden_states(model, [wanted[cache.lengths[0] :]], cache, chunk_size):
                pass
            held = wanted
            scores |= _scored(model, cache, group, trunk)
    return [scores[number] for number in range(len(pairs))]


def _as_read(limit: int, number: int, context: Sequence[int], continuation: Sequence[int]) -> _Sequence:
    if not context:
        raise NapkinError(f"pair {number} has no context: begin with a separator or with text")
    if len(continuation) > limit:
        raise NapkinError(
            f"the continuation of pair {number} has {len(continuation)} tokens, more than context_length {limit}: "
            "shorten it"
        )
    tokens = (*context, *continuation)[:-1][-limit:] if continuation else ()
    return _Sequence(number, tokens, len(tokens) - len(continuation), tuple(continuation))


def _groups(sequences: list[_Sequence], branch_tokens: int) -> Iterator[tuple[list[_Sequence], int]]:
    """Neighbours in sorted order whose branches fit a pass, and the length of their trunk."""
    group, n_nodes, trunk = [sequences[0]], len(sequences[0].tokens), sequences[0].first
    for each in sequences[1:]:
        shared = common_length(group[-1].tokens, each.tokens)
        grown, shorter = n_nodes + len(each.tokens) - shared, min(trunk, shared, each.first)
        if grown - shorter <= branch_tokens:
            group, n_nodes, trunk = [*group, each], grown, shorter
        else:
            yield group, trunk
            group, n_nodes, trunk = [each], len(each.tokens), each.first
    yield group, trunk


def _scored(model: Transformer, cache: ContiguousCache, group: list[_Sequence], trunk: int) -> dict[int, Score]:
    tokens, depths, parents, paths = _tree([each.tokens[trunk:] for each in group])
    sees = np.eye(len(tokens), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    device = cache.device
    branching = cache.branch(torch.tensor(depths, device=device) + trunk, torch.from_numpy(sees).to(device))
    with evaluation_mode(model):
        (hidden,) = model.hidden(torch.tensor([tokens], device=device), cache=branching)
    nodes = [node for each, path in zip(group, paths, strict=True) for node in path[each.first - trunk :]]
    logprobs, greedy = _compared(model, hidden[nodes], [target for each in group for target in each.targets])
    scores, start = {}, 0
    for each in group:
        own = slice(start, start + len(each.targets))
        scores[each.number] = Score(tuple(logprobs[own]), all(greedy[own]))
        start = own.stop
    return scores


def _scored_alone(model: Transformer, cache: ContiguousCache, sequence: _Sequence, chunk_size: int) -> Score:
    cache.truncate(0)
    with evaluation_mode(model):
        parts = [hidden[0] for hidden, _ in hidden_states(model, [sequence.tokens], cache, chunk_size)]
    logprobs, greedy = _compared(model, torch.cat(parts)[sequence.first :], sequence.targets)
    return Score(tuple(logprobs), all(greedy))


def _compared(model: Transformer, hidden: Tensor, targets: Sequence[int]) -> tuple[list[float], list[bool]]:
    """The log-probability of a target after each hidden state, and whether none is more likely."""
    logprobs: list[float] = []
    greedy: list[bool] = []
    parts = (each.split(_ROWS_OF_LOGITS) for each in (hidden, torch.tensor(targets, device=hidden.device)))
    for states, wanted in zip(*parts, strict=True):
        logits = model.logits_of(states)
        logprobs += target_log_probabilities(logits, wanted).tolist()
        greedy += (logits.argmax(dim=-1) == wanted).tolist()
    return logprobs, greedy


def _tree(branches: list[tuple[int, ...]]) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Each node's token, depth and parent (-1 is the trunk), and each branch's nodes, of branches in sorted order."""
    tokens: list[int] = []
    depths: list[int] = []
    parents: list[int] = []
    paths: list[list[int]] = []
    before: tuple[int, ...] = ()
    for branch in branches:
        shared = common_length(before, branch)
        path = paths[-1][:shared] if paths else []
        for depth in range(shared, len(branch)):
            parents.append(path[-1] if path else -1)
            path.append(len(tokens))
            tokens.append(branch[depth])
            depths.append(depth)
        paths.append(path)
        before = branch
    return tokens, depths, parents, paths
