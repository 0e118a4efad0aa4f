"""Drawing the next tokens of a batch of sequences, each by its own settings.

Of logits z, one for each token of the vocabulary, in this order:

    z   = z / r if z > 0 else z · r      for tokens that occurred   repetition_penalty r (Keskar et al. 2019)
    z   = z + b                          for tokens with a bias     logit_bias b
    w   = exp((z - max z) / T)                                      temperature T; at 0 the largest z is taken
    keep the k largest w                                            top_k (Fan et al. 2018)
    of these the fewest that reach the part p of their sum          top_p (Holtzman et al. 2020)
    of these the w >= m, since the largest is 1                     min_p m (Nguyen et al. 2024)
    draw the first token at which the sum of kept w exceeds u · their whole sum

u is a function of (seed, number of the draw) and not of a generator's state, so a sequence continues alike whatever
else is in its batch. `plain_draw` is this page in Python, a token at a time; `draw` the same for a batch of tensors,
which sorts a few of the likeliest tokens and not the vocabulary. The tests hold one to the other.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from napkin.data.permutation import random_word
from napkin.errors import NapkinError
from napkin.inference.settings import Sampling
from napkin.kernels.deterministic import cumulative_sums

NOT_FINITE = "the model's logits hold infinity or NaN, nothing can be drawn: use an earlier checkpoint"
_FIRST_LOOK = 256
"""Tokens that are sorted for top-p at first; where they do not reach the mass, eight times as many: sorting a whole
vocabulary takes as long as a small model's token."""


@dataclass(frozen=True)
class Draw:
    """A drawn token."""

    token: int
    logprob: float | None = None
    """Its log-probability in nats by the model alone, before any setting; None if `logprobs` is."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities, as many as `logprobs` says."""
    sampled_logprob: float | None = None
    """The log-probability with which it was drawn, after all settings; None if nobody asked."""


def plain_draw(logits: Sequence[float], settings: Sampling, number: int, history: Sequence[int] = ()) -> int:
    """The token that is drawn from a row of logits, `number` tokens after the prompt: the formula, slowly.

    >>> plain_draw([1.0, 3.0, 2.9], Sampling(temperature=0), 0)
    1
    >>> plain_draw([1.0, 3.0, 2.9], Sampling(temperature=0, repetition_penalty=1.5), 0, history=[1])
    2
    >>> [plain_draw([1.0, 3.0, 2.9], Sampling(temperature=1.0, top_k=2, seed=7), number) for number in range(6)]
    [2, 2, 2, 2, 1, 1]
    """
    z = list(logits)
    for token in set(history):
        z[token] = z[token] / settings.repetition_penalty if z[token] > 0 else z[token] * settings.repetition_penalty
    for token, bias in settings.logit_bias:
        z[token] += bias
    # Among equally likely tokens the first ids come first.
    order = sorted(range(len(z)), key=lambda token: -z[token])
    if settings.temperature == 0:
        return order[0]
    largest = z[order[0]]
    w = [math.exp((each - largest) / settings.temperature) for each in z]
    order = order[: settings.top_k]
    reached, whole, kept = 0.0, sum(w[token] for token in order), set[int]()
    for token in order:
        if reached < settings.top_p * whole and w[token] > 0 and w[token] >= settings.min_p:
            kept.add(token)
        reached += w[token]
    u = uniform(settings.seed, number)
    wanted, passed = u * sum(w[token] for token in kept), 0.0
    for token in sorted(kept):
        passed += w[token]
        if passed > wanted:
            return token
    return max(kept)


def uniform(seed: int, number: int, stream: int = 0) -> float:
    """Number `number` of a seed's stream of uniform numbers in [0, 1): 53 random bits."""
    return (random_word(random_word(seed, stream), number) >> 11) * 2.0**-53


@torch.inference_mode()
def draw(
    logits: Float[Tensor, "sequence vocab_size"],
    settings: Sequence[Sampling],
    numbers: Sequence[int],
    histories: Sequence[Sequence[int]],
    *,
    tell_sampled: bool = False,
) -> list[Draw]:
    """Draw a token for each row of logits.

    numbers[i] is how many tokens sequence i drew before, histories[i] its tokens so far, prompt included, which only
    repetition_penalty reads. With `tell_sampled` draws have a `sampled_logprob`, which is 0 at temperature 0. Raises
    NapkinError where logits hold NaN or infinity, as those of a diverged model may.
    """
    logits = logits.float()
    changed = _changed(logits, settings, histories)
    tokens = changed.argmax(dim=-1)
    sampled = torch.zeros(len(settings), dtype=torch.float64, device=logits.device)
    random = [row for row, each in enumerate(settings) if each.temperature > 0]
    if random:
        chosen = [settings[row] for row in random]
        uniforms = [uniform(each.seed, numbers[row]) for row, each in zip(random, chosen, strict=True)]
        weights = _weights(changed if len(random) == len(settings) else changed[random], chosen)
        tokens[random] = drawn = inverted(weights, uniforms)
        if tell_sampled:
            sampled[random] = (weights.gather(1, drawn[:, None])[:, 0] / weights.sum(dim=-1)).log()
    draws = told(logits, tokens.tolist(), settings)
    if not tell_sampled:
        return draws
    return [replace(each, sampled_logprob=value) for each, value in zip(draws, sampled.tolist(), strict=True)]


@torch.inference_mode()
def distributions(
    logits: Float[Tensor, "sequence vocab_size"], settings: Sequence[Sampling], histories: Sequence[Sequence[int]]
) -> Float[Tensor, "sequence vocab_size"]:
    """The probabilities with which `draw` draws each token, in float64. Every temperature is above 0."""
    weights = _weights(_changed(logits.float(), settings, histories), settings)
    return weights / weights.sum(dim=-1, keepdim=True)


def _changed(logits: Tensor, settings: Sequence[Sampling], histories: Sequence[Sequence[int]]) -> Tensor:
    """Logits after penalties and biases, finite as the given ones are, which stay."""
    if not logits.isfinite().all():
        raise NapkinError(NOT_FINITE)
    penalized = [row for row, each in enumerate(settings) if each.repetition_penalty != 1]
    biased = [row for row, each in enumerate(settings) if each.logit_bias]
    if not (penalized or biased):
        return logits
    changed, device = logits.clone(), logits.device
    if penalized:
        places = _places(penalized, [array("q", histories[row]) for row in penalized], device)
        penalties = torch.ones(len(settings), device=device)
        penalties[penalized] = torch.tensor([settings[row].repetition_penalty for row in penalized], device=device)
        found, penalty = changed[places], penalties[places[0]]
        # A token that occurred several times is written several times, each time with the same number.
        changed[places] = torch.where(found > 0, found / penalty, found * penalty)
    if biased:
        arrays = [settings[row].bias_arrays for row in biased]
        places = _places(biased, [ids for ids, _ in arrays], device)
        if int(places[1].max()) >= logits.shape[1]:
            wrong = int(places[1].max())
            raise NapkinError(f"logit_bias names token {wrong}: the model has 0 to {logits.shape[1] - 1}")
        biases = _joined([each for _, each in arrays], torch.float32)
        changed.index_put_(places, biases.to(device), accumulate=True)
    # Logits near the end of their range would become infinite.
    limits = torch.finfo(changed.dtype)
    return changed.clamp_(limits.min, limits.max)


def _places(rows: Sequence[int], ids: "Sequence[array[int]]", device: torch.device) -> tuple[Tensor, Tensor]:
    """The row and the id of each element: ids[i] are those of rows[i]."""
    counts = torch.tensor([len(each) for each in ids], device=device)
    return torch.tensor(rows, device=device).repeat_interleave(counts), _joined(ids, torch.int64).to(device)


def _joined(parts: "Sequence[array[Any]]", dtype: torch.dtype) -> Tensor:
    whole = array(parts[0].typecode)
    for each in parts:
        whole.extend(each)
    return torch.frombuffer(whole, dtype=dtype) if whole else torch.empty(0, dtype=dtype)


def inverted(weights: Float[Tensor, "row vocab_size"], uniforms: Sequence[float]) -> Int[Tensor, " row"]:
    """The token at which each row's cumulative weight, in the order of ids, passes its uniform number."""
    cumulative = cumulative_sums(weights)
    wanted = torch.tensor(uniforms, dtype=weights.dtype, device=weights.device)[:, None] * cumulative[:, -1:]
    # The first that exceeds it, which has a weight above 0; rounding up to the whole sum would find none.
    wanted = torch.minimum(wanted, cumulative[:, -1:].nextafter(torch.zeros_like(wanted)))
    return torch.searchsorted(cumulative, wanted, right=True)[:, 0]


def _weights(logits: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Probabilities that do not add up to 1, in float64; 0 for what top-k, top-p and min-p leave out."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    # In float64 the probabilities of a large vocabulary add up to 1. The maximum is subtracted first, so that division
    # by a small temperature cannot overflow.
    scaled = (logits.double() - logits.amax(dim=-1, keepdim=True)) / column([each.temperature for each in settings])
    weights = scaled.exp()
    if any(each.top_k is not None or each.top_p < 1 or each.min_p > 0 for each in settings):
        weights = weights.where(_kept(weights, settings, column), 0)
    return weights


def _kept(
    weights: Tensor, settings: Sequence[Sampling], column: Callable[[list[float]], Tensor]
) -> Bool[Tensor, "sequence vocab_size"]:
    """Return a mask of the tokens that top-k, top-p and min-p leave; among equally likely ones the first ids stay."""
    n_all = weights.shape[-1]
    n_looked = min(max(_FIRST_LOOK, *(1 + (each.top_k or 0) for each in settings)), n_all)
    while True:
        sorted_weights = weights.topk(n_looked, dim=-1).values
        limits = column([each.top_k or n_all for each in settings])
        within = sorted_weights.where(torch.arange(n_looked, device=weights.device) < limits, 0)
        whole = weights.sum(dim=-1, keepdim=True).where(limits >= n_all, within.sum(dim=-1, keepdim=True))
        # The likeliest token is always kept: the sum before it is 0.
        before = cumulative_sums(within) - within
        kept = (before < column([each.top_p for each in settings]) * whole) & (within > 0)
        kept &= within >= column([each.min_p for each in settings])
        n_kept = kept.sum(dim=-1, keepdim=True)
        if n_looked == n_all or not bool((n_kept == n_looked).any()):
            break
        n_looked = min(8 * n_looked, n_all)
    least = sorted_weights.gather(1, n_kept - 1)
    equal = weights == least
    room = n_kept - (weights > least).sum(dim=-1, keepdim=True)
    return (weights > least) | (equal & (equal.cumsum(dim=-1) <= room))


def told_draws(logits: Float[Tensor, "position vocab_size"], tokens: Sequence[int], n_top: int) -> list[Draw]:
    """What each row of logits, without any setting, says of a token, and the likeliest ones."""
    if not tokens:
        return []
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.topk(min(n_top, logprobs.shape[-1]), dim=-1)
    ids, values = top.indices.tolist(), top.values.tolist()
    chosen = logprobs.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    return [
        Draw(token, logprob, tuple(zip(ids[row], values[row], strict=True)))
        for row, (token, logprob) in enumerate(zip(tokens, chosen, strict=True))
    ]


def told(logits: Float[Tensor, "row vocab_size"], tokens: list[int], settings: Sequence[Sampling]) -> list[Draw]:
    """Each row's token with what `logprobs` asks for."""
    draws: list[Draw] = []
    for row, (token, each) in enumerate(zip(tokens, settings, strict=True)):
        draws += [Draw(token)] if each.logprobs is None else told_draws(logits[row, None], [token], each.logprobs)
    return draws
