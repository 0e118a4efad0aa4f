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
else is in its batch. `plain_draw` is this page in Python, a token at a time; `draw` the same for a batch of tensors. On
a CPU it runs compiled loops that find where the kept tokens end without sorting (kernels/sampling); elsewhere it sorts
a few of the likeliest tokens and not the vocabulary. The tests hold both to the page. All but u is computed where the
logits are, and the host reads tokens once.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from napkin.data.permutation import random_word
from napkin.errors import NapkinError
from napkin.inference.settings import Sampling
from napkin.kernels.deterministic import cumulative_sums
from napkin.kernels.sampling.draws import are_compiled, drawn_rows, row_probabilities
from napkin.tensors import sent_to

NOT_FINITE = "the model's logits hold infinity or NaN, nothing can be drawn: use an earlier checkpoint"
_FIRST_LOOK = 256
"""Tokens that are sorted for top-p at first; where they do not reach the mass, eight times as many: sorting a whole
vocabulary takes as long as a small model's token."""


@dataclass(frozen=True)
class Draw:
    """A drawn token."""

    token: int
    logprob: float | None = None
    """Log-probability of the token in nats under the model alone, before any setting; None if `logprobs` is None."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities, as many as `logprobs` says."""
    sampled_logprob: float | None = None
    """The log-probability with which it was drawn, after all settings; None if not requested."""


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
    finite: Bool[Tensor, ""] | None = None,
) -> list[Draw]:
    """Draw a token for each row of logits.

    numbers[i] is how many tokens sequence i drew before, histories[i] its tokens so far, prompt included, which only
    repetition_penalty reads. With `tell_sampled` draws have a `sampled_logprob`, which is 0 at temperature 0. Raises
    NapkinError where logits hold NaN or infinity, as those of a diverged model may, or `finite` is False.

    The settings go to the device in one copy, and tokens come back in one, unless many tokens are nearly as likely as
    the likeliest, or `logprobs` is asked for.
    """
    logits = logits.float().contiguous()
    changed = _changed(logits, settings, histories)
    if are_compiled(changed):
        tokens, logprobs = _drawn_in_loops(logits, changed, settings, numbers, finite)
    elif all(each.temperature == 0 for each in settings):
        tokens, logprobs = _likeliest(logits, changed, finite), [0.0] * len(settings)
    else:
        tokens, logprobs = _drawn_by_sorting(logits, changed, Columns.of(settings, numbers, logits.device), finite)
    draws = told(logits, tokens, settings)
    if not tell_sampled:
        return draws
    return [replace(each, sampled_logprob=value) for each, value in zip(draws, logprobs, strict=True)]


def _drawn_in_loops(
    logits: Tensor,
    changed: Tensor,
    settings: Sequence[Sampling],
    numbers: Sequence[int],
    finite: Bool[Tensor, ""] | None,
) -> tuple[list[int], list[float]]:
    """The tokens and their log-probabilities, by the compiled loops of a CPU."""
    drawn, logprobs = drawn_rows(changed, _columns(settings, numbers))
    tokens = drawn.tolist()
    # A changed logit is finite even where the given one is infinite.
    are_finite = min(tokens) >= 0 and (changed is logits or bool(logits.isfinite().all()))
    if not are_finite or not (finite is None or finite):
        raise NapkinError(NOT_FINITE)
    return tokens, logprobs.tolist()


def _drawn_by_sorting(
    logits: Tensor, changed: Tensor, columns: "Columns", finite: Bool[Tensor, ""] | None
) -> tuple[list[int], list[float]]:
    """The tokens and their log-probabilities, by torch's operators on the device of the logits."""
    all_finite = logits.isfinite().all() if finite is None else logits.isfinite().all() & finite
    n_looked, n_rows = columns.n_looked, len(logits)
    while True:
        tokens, logprobs, sure = drawn_tokens(changed, columns, n_looked)
        # Ids are exact in float64.
        parts = tokens.double(), logprobs, torch.stack((all_finite, sure)).double()
        *tokens_and_logprobs, is_finite, is_sure = torch.cat(parts).tolist()
        if not is_finite:
            raise NapkinError(NOT_FINITE)
        if is_sure:
            return [int(each) for each in tokens_and_logprobs[:n_rows]], tokens_and_logprobs[n_rows:]
        n_looked = min(8 * n_looked, logits.shape[1])


def _likeliest(logits: Tensor, changed: Tensor, finite: Bool[Tensor, ""] | None) -> list[int]:
    """The likeliest token of each row, by few operators: between two tokens of a large model each of them is slow."""
    parts = [changed.argmax(dim=-1), *logits.aminmax()]
    if finite is not None:
        parts.append(finite)
    # Ids are exact in float64; the least and the largest are NaN if one number is.
    numbers = torch.cat([each.double().view(-1) for each in parts]).tolist()
    least, largest, *is_finite = numbers[len(logits) :]
    if not (math.isfinite(least) and math.isfinite(largest) and all(is_finite)):
        raise NapkinError(NOT_FINITE)
    return [int(each) for each in numbers[: len(logits)]]


@dataclass(frozen=True)
class Columns:
    """The settings of a batch of draws on their device, and what the host knows of them."""

    values: Float[Tensor, "5 row 1"]
    """Temperatures, top_k, top_p, min_p, and the uniform numbers; a row at temperature 0 has top_k 1."""
    n_looked: int
    """Likeliest tokens that are sorted at first; 0 if no setting leaves tokens out."""

    @classmethod
    def of(cls, settings: Sequence[Sampling], numbers: Sequence[int], device: torch.device) -> "Columns":
        """The settings in one copy to the device."""
        random = [each for each in settings if each.temperature > 0]
        filters = any(each.top_k is not None or each.top_p < 1 or each.min_p > 0 for each in random)
        n_looked = max(_FIRST_LOOK, *(1 + (each.top_k or 0) for each in random)) if filters else 0
        values = _columns(settings, numbers).T[..., None].contiguous()
        return cls(sent_to(device, values), n_looked)


def _columns(settings: Sequence[Sampling], numbers: Sequence[int]) -> Float[Tensor, "row 5"]:
    """Temperature, top_k, top_p, min_p and the uniform number of each row; at temperature 0 top_k is 1."""
    rows = [
        (1.0, 1.0, 1.0, 0.0, 0.0)
        if each.temperature == 0
        else (each.temperature, each.top_k or math.inf, each.top_p, each.min_p, uniform(each.seed, number))
        for each, number in zip(settings, numbers, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def drawn_tokens(
    logits: Float[Tensor, "row vocab_size"], columns: Columns, n_looked: int
) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"], Bool[Tensor, ""]]:
    """A token for each row and the log-probability with which it was drawn, without a look by the host; they are right
    where the last tensor is True, which says that sorting `n_looked` tokens was enough."""
    weights, sure = _weights(logits, columns, n_looked)
    drawn = _inverted(weights, columns.values[4])
    logprobs = (weights.gather(1, drawn[:, None]) / weights.sum(dim=-1, keepdim=True)).log()[:, 0]
    # With several tokens at the largest logit, argmax takes any of them; a smaller logit may have weight 1 too.
    takes_likeliest = (columns.values[1] == 1)[:, 0]
    return logits.argmax(dim=-1).where(takes_likeliest, drawn), logprobs.where(~takes_likeliest, 0.0), sure


@torch.inference_mode()
def distributions(
    logits: Float[Tensor, "sequence vocab_size"], settings: Sequence[Sampling], histories: Sequence[Sequence[int]]
) -> Float[Tensor, "sequence vocab_size"]:
    """The probabilities with which `draw` draws each token, in float64. Every temperature is above 0."""
    logits = logits.float().contiguous()
    changed = _changed(logits, settings, histories)
    numbers = [0] * len(settings)
    if are_compiled(changed):
        probabilities, are_finite = row_probabilities(changed, _columns(settings, numbers))
        if not (are_finite and (changed is logits or logits.isfinite().all())):
            raise NapkinError(NOT_FINITE)
        return probabilities
    if not logits.isfinite().all():
        raise NapkinError(NOT_FINITE)
    columns = Columns.of(settings, numbers, logits.device)
    n_looked = columns.n_looked
    while True:
        weights, sure = _weights(changed, columns, n_looked)
        if sure:
            return weights / weights.sum(dim=-1, keepdim=True)
        n_looked = min(8 * n_looked, logits.shape[1])


def _changed(logits: Tensor, settings: Sequence[Sampling], histories: Sequence[Sequence[int]]) -> Tensor:
    """Logits after penalties and biases, finite where the given ones are; the given ones are not changed."""
    penalized = [row for row, each in enumerate(settings) if each.repetition_penalty != 1]
    biased = [row for row, each in enumerate(settings) if each.logit_bias]
    if not (penalized or biased):
        return logits
    changed, device = logits.clone(), logits.device
    if penalized:
        places = _places(penalized, [array("q", histories[row]) for row in penalized], device)
        penalties = torch.tensor([each.repetition_penalty for each in settings], dtype=torch.float32)
        seen_logits, penalty = changed[places], sent_to(device, penalties)[places[0]]
        # A token that occurred several times is written several times, each time with the same number.
        changed[places] = torch.where(seen_logits > 0, seen_logits / penalty, seen_logits * penalty)
    if biased:
        arrays = [settings[row].bias_arrays for row in biased]
        if (largest := max(max(ids) for ids, _ in arrays)) >= logits.shape[1]:
            raise NapkinError(f"logit_bias names token {largest}: the model has 0 to {logits.shape[1] - 1}")
        places = _places(biased, [ids for ids, _ in arrays], device)
        biases = _joined([each for _, each in arrays], torch.float32)
        changed.index_put_(places, sent_to(device, biases), accumulate=True)
    # Logits near the end of their range would become infinite.
    limits = torch.finfo(changed.dtype)
    return changed.clamp_(limits.min, limits.max)


def _places(rows: Sequence[int], ids: "Sequence[array[int]]", device: torch.device) -> tuple[Tensor, Tensor]:
    """The row and the id of each element: ids[i] are those of rows[i]."""
    each = [row for row, of_row in zip(rows, ids, strict=True) for _ in of_row]
    both = torch.stack((torch.tensor(each, dtype=torch.int64), _joined(ids, torch.int64)))
    first, second = sent_to(device, both)
    return first, second


def _joined(parts: "Sequence[array[Any]]", dtype: torch.dtype) -> Tensor:
    whole = array(parts[0].typecode)
    for each in parts:
        whole.extend(each)
    return torch.frombuffer(whole, dtype=dtype) if whole else torch.empty(0, dtype=dtype)


def inverted(weights: Float[Tensor, "row vocab_size"], uniforms: Sequence[float]) -> Int[Tensor, " row"]:
    """The token at which each row's cumulative weight, in the order of ids, passes its uniform number."""
    return _inverted(weights, torch.tensor(uniforms, dtype=weights.dtype, device=weights.device)[:, None])


def _inverted(weights: Tensor, uniforms: Float[Tensor, "row 1"]) -> Int[Tensor, " row"]:
    cumulative = cumulative_sums(weights)
    wanted = uniforms * cumulative[:, -1:]
    # The first that exceeds it, which has a weight above 0; rounding up to the whole sum would find none.
    wanted = torch.minimum(wanted, cumulative[:, -1:].nextafter(torch.zeros_like(wanted)))
    # With NaN weights the index would be past the last token.
    return torch.searchsorted(cumulative, wanted, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def _weights(logits: Tensor, columns: Columns, n_looked: int) -> tuple[Tensor, Bool[Tensor, ""]]:
    """Probabilities that do not add up to 1, in float64; 0 for what top-k, top-p and min-p leave out. They are right if
    the second tensor is True."""
    # In float64 the probabilities of a large vocabulary add up to 1. The maximum is subtracted first, so that division
    # by a small temperature cannot overflow.
    weights = ((logits.double() - logits.amax(dim=-1, keepdim=True)) / columns.values[0]).exp()
    if not n_looked:
        return weights, torch.ones((), dtype=torch.bool, device=logits.device)
    kept, sure = _kept(weights, columns, min(n_looked, logits.shape[1]))
    return weights.where(kept, 0), sure


def _kept(
    weights: Tensor, columns: Columns, n_looked: int
) -> tuple[Bool[Tensor, "sequence vocab_size"], Bool[Tensor, ""]]:
    """Return a mask of the tokens that top-k, top-p and min-p leave, and True if `n_looked` sorted ones were enough to
    find them; among equally likely ones the first ids stay."""
    n_all = weights.shape[-1]
    _, limits, top_ps, min_ps, _ = columns.values
    sorted_weights = weights.topk(n_looked, dim=-1).values
    within = sorted_weights.where(torch.arange(n_looked, device=weights.device) < limits, 0)
    whole = weights.sum(dim=-1, keepdim=True).where(limits >= n_all, within.sum(dim=-1, keepdim=True))
    # The likeliest token is always kept: the sum before it is 0.
    before = cumulative_sums(within) - within
    kept = (before < top_ps * whole) & (within > 0)
    kept &= within >= min_ps
    n_kept = kept.sum(dim=-1, keepdim=True)
    sure = (n_kept < n_looked).all() if n_looked < n_all else torch.ones((), dtype=torch.bool, device=weights.device)
    # If all are NaN, nothing is kept.
    least = sorted_weights.gather(1, (n_kept - 1).clamp(min=0))
    equal = weights == least
    room = n_kept - (weights > least).sum(dim=-1, keepdim=True)
    return (weights > least) | (equal & (equal.cumsum(dim=-1) <= room)), sure


def told_draws(logits: Float[Tensor, "position vocab_size"], tokens: Sequence[int], n_top: int) -> list[Draw]:
    """The log-probabilities of a token and of the likeliest ones, from each row of logits without any setting."""
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
    """Each row's token with the log-probabilities that `logprobs` requests."""
    draws: list[Draw] = []
    for row, (token, each) in enumerate(zip(tokens, settings, strict=True)):
        draws += [Draw(token)] if each.logprobs is None else told_draws(logits[row, None], [token], each.logprobs)
    return draws
