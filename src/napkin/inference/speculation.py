"""Speculative sampling (Leviathan, Kalman & Matias 2023): several tokens per pass of the model that is to speak.

Something cheap proposes tokens, one pass of the model tests all of them, and those before the first rejected one stay,
with one more that the pass gives anyway. What comes is distributed as if the model had drawn each token alone, under
all settings of `Sampling`; at temperature 0 it is the same tokens, as far as products over several tokens round like
those over one.
"""

import time
from collections.abc import Iterator, Sequence

from torch import Tensor

from napkin.errors import NapkinError
from napkin.inference.generation import PREFILL_CHUNK
from napkin.inference.proposals import CachedTokens, Proposer
from napkin.inference.sampling import Draw, draw, told
from napkin.inference.settings import MOST_PROPOSED, Sampling
from napkin.inference.speculation_plan import SpeculationMeter
from napkin.model.transformer import Transformer


def speculate(
    model: Transformer,
    prompt: Sequence[int],
    n_tokens: int,
    sampling: Sampling,
    proposer: Proposer,
    *,
    proposed: int | None = None,
    stop: int | None = None,
    chunk_size: int = PREFILL_CHUNK,
    meter: SpeculationMeter | None = None,
) -> Iterator[Draw]:
    """Yield up to `n_tokens` tokens that continue `prompt`, as `continue_prompt` does.

    `proposed` tokens are proposed for each pass, up to 16; None is as many as the meter plans to be fastest. The text
    does not depend on it.
    """
    if not prompt:
        raise NapkinError("the prompt holds no token: begin with a separator or with text")
    if proposed is not None and not 0 <= proposed <= MOST_PROPOSED:
        raise NapkinError(f"{proposed} tokens are to be proposed for each pass: use 0 to {MOST_PROPOSED}")
    meter = SpeculationMeter() if meter is None else meter
    tokens, ends = list(prompt), {*sampling.stop_ids, stop}
    target = CachedTokens(model, len(prompt) + max(n_tokens, 1))
    number = 0
    while number < n_tokens:
        started, drafted_before = time.perf_counter(), proposer.seconds
        wanted = meter.next_proposed() if proposed is None else proposed
        most = min(wanted, target.make_room(tokens), n_tokens - number - 1)
        # The prompt goes through the model by itself, so that the seconds of a pass are those of its tokens.
        proposals = proposer.propose(tokens, most if number else 0, sampling, number)
        asked = time.perf_counter()
        logits = target.logits([*tokens, *proposals], len(proposals) + 1, chunk_size=chunk_size)
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
    """What the target draws alone, up to the first that was not proposed: all rows at once."""
    rows = range(len(proposals) + 1)
    read = sampling.repetition_penalty != 1
    histories = [[*tokens, *proposals[:row]] if read else [] for row in rows]
    drawn = draw(logits, [sampling] * len(rows), [number + row for row in rows], histories)
    same = next((row for row, token in enumerate(proposals) if drawn[row].token != token), len(proposals))
    return drawn[: same + 1]
