"""Distillation (Hinton, Vinyals & Dean 2015): a student learns a teacher's distributions of tokens, beside the tokens.

Of a token with the student's logits s and the teacher's t,

    loss = (1 - w) · -log softmax(s)[target]  +  w · τ² · KL(p ‖ q),   p = softmax(t / τ),  q = softmax(s / τ)

The forward divergence makes the student cover what the teacher holds possible; τ² keeps its gradient, which is
w · τ · (q - p) with respect to s, as large at any temperature. As in `linear_log_probabilities`, a chunk of rows of
logits is computed, of both models, turned into its gradient and dropped: the logits of a batch never all exist.

A teacher may also have been asked before: of each token its k likeliest tokens are kept with their log-probabilities at
τ, and the logarithm of the probability of all others together. The divergence is then that of k + 1 outcomes, with the
student's probability of all others as its own last one. Never above that of the whole distributions, it is equal to it
for k = vocab_size. Its gradient has p spread over the others as the student does itself: nothing is learned of how they
divide their probability, and all about how much they have.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.loss.cross_entropy import bound_, chunk_size_of
from napkin.kernels.loss.log_probabilities import HeadChunks, HeadGradients
from napkin.kernels.operators import dtype_of_product, early_gradient, scaled

Rows = Float[Tensor, "row vocab_size"]


@runtime_checkable
class TaughtRows(Protocol):
    """A teacher's distributions for some tokens, at its temperature τ."""

    def divergences(self, rows: slice, log_q: Rows, temperature: float) -> tuple[Float[Tensor, " row"], Rows]:
        """The divergences of some tokens, and the probabilities that the student's are drawn to; `log_q` are the
        student's log-probabilities at the temperature."""
        ...


class WholeDistributions:
    """The distributions of a teacher that computes beside the student: what its head reads, and its head.

    Under autocast the products are in autocast's dtype, where this is made.
    """

    def __init__(
        self,
        hidden: Float[Tensor, "n d_teacher"],
        weight: Float[Tensor, "vocab_size d_teacher"],
        logit_softcap: float | None = None,
    ) -> None:
        self.hidden, self.softcap, self.dtype = hidden, logit_softcap, dtype_of_product(hidden, weight)
        self.weight = weight.to(self.dtype)

    def divergences(self, rows: slice, log_q: Rows, temperature: float) -> tuple[Float[Tensor, " row"], Rows]:
        """See `TaughtRows`."""
        chunks = HeadChunks(self.dtype, temperature, 1, self.softcap, False)
        logits = chunks.logits(self.hidden[rows], self.weight)
        if chunks.bound is not None:
            bound_(logits, chunks.bound, with_slopes=False)
        log_p = chunks.log_softmax(logits).to(log_q.dtype)
        p = log_p.exp()
        # The limit of p · log p at 0 is 0.
        log_p.sub_(log_q).mul_(p).masked_fill_(p == 0, 0)
        return log_p.sum(dim=1), p


@dataclass(frozen=True)
class LikeliestTokens:
    """The k likeliest tokens of a teacher's distributions, and the rest of each distribution as one outcome."""

    ids: Int[Tensor, "n k"]
    log_probabilities: Float[Tensor, "n k_and_rest"]
    """The log-probability of each of these tokens, and last that of all others together, -infinity if there are no
    others."""

    def divergences(self, rows: slice, log_q: Rows, temperature: float) -> tuple[Float[Tensor, " row"], Rows]:
        """See `TaughtRows`. The log-probabilities are of the temperature that they were computed at."""
        ids, log_p = self.ids[rows].long(), self.log_probabilities[rows].to(log_q.dtype)
        others = log_q.scatter(1, ids, -torch.inf)
        log_rest = others.logsumexp(dim=1, keepdim=True)
        p, log_both = log_p.exp(), torch.cat([log_q.gather(1, ids), log_rest], dim=1)
        divergences = (p * (log_p - log_both)).masked_fill_(p == 0, 0).sum(dim=1)
        # The probability of the others, divided as the student divides it; dropped if the student leaves them none.
        drawn = others.sub_(log_rest.nan_to_num(neginf=0.0)).exp_().mul_(p[:, -1:])
        return divergences, drawn.scatter_(1, ids, p[:, :-1])


@dataclass(frozen=True)
class Distillation:
    """Settings and targets of distillation: what a student learns from a teacher."""

    taught: TaughtRows
    weight: float
    """w, that of the divergence; the tokens themselves have 1 - w."""
    temperature: float
    """τ."""


class DistilledScores(NamedTuple):
    """A student's log-probabilities of tokens, and its divergence from its teacher, in nats, in fp32 or wider."""

    log_probabilities: Float[Tensor, " n"]
    entropies: Float[Tensor, " n"]
    divergences: Float[Tensor, " n"]
    """KL(p ‖ q) at the temperature, without its factor τ²."""
    weighted_sum: Float[Tensor, ""] | None
    """coefficients · ((1 - w) · log_probabilities - w · τ² · divergences), where there are coefficients; it alone has
    a gradient."""


def linear_distillation(
    hidden: Float[Tensor, "n d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, " n"],
    distillation: Distillation,
    coefficients: Float[Tensor, " n"] | None = None,
    *,
    chunk_size: int | None = None,
    logit_softcap: float | None = None,
) -> DistilledScores:
    """The scores of targets and of a teacher's distributions of them, from the student's hidden states.

    All else is as in `linear_log_probabilities`, with coefficients or without gradients.
    """
    size = chunk_size or chunk_size_of(weight)
    chunks = HeadChunks(dtype_of_product(hidden, weight), 1.0, size, logit_softcap, False)
    with torch.autocast(hidden.device.type, enabled=False):
        if coefficients is None or not torch.is_grad_enabled():
            with torch.no_grad():
                results: Any = _computed(hidden, weight, targets, distillation, chunks, None, (False, False))
            log_probabilities, entropies, divergences, _, _ = results
            return DistilledScores(log_probabilities, entropies, divergences, None)
        results = _Distilled.apply(hidden, weight, targets, coefficients, distillation, chunks)
        return DistilledScores(*results)


class _Distilled(torch.autograd.Function):
    """The weighted sum; gradients are computed in its forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        coefficients: Tensor,
        distillation: Distillation,
        chunks: HeadChunks,
    ) -> tuple[Tensor, ...]:
        with early_gradient():
            # One more number, since an empty tensor has no maximum; gradients of a scaled fp16 loss do not underflow.
            largest = torch.cat([coefficients.abs(), coefficients.new_full((1,), 1e-30)]).amax()
            factors = coefficients / largest
        *scores, grad_hidden, grad_weight = _computed(
            hidden, weight, targets, distillation, chunks, factors, ctx.needs_input_grad[:2]
        )
        log_probabilities, _, divergences = scores
        w, square = distillation.weight, distillation.temperature**2
        terms = (1 - w) * log_probabilities - w * square * divergences
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.save_for_backward(grad_hidden, grad_weight, largest)
        ctx.mark_non_differentiable(*scores)
        return *scores, coefficients.to(terms.dtype) @ terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *gradients, largest = ctx.saved_tensors
        return (*scaled(gradients, grad_outputs[-1] * largest, ctx.dtypes), None, None, None, None)


def _computed(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    distillation: Distillation,
    chunks: HeadChunks,
    factors: Tensor | None,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Log-probabilities, entropies and divergences, and the gradients of hidden states and weight where wanted."""
    log_probabilities, entropies = chunks.empty_values(hidden)
    divergences = torch.empty_like(entropies)
    total = HeadGradients.start(hidden, weight, chunks, wanted)
    w, temperature = distillation.weight, distillation.temperature
    for rows in chunks.rows(hidden):
        logits = chunks.logits(hidden[rows], total.matrix)
        slopes = None if chunks.bound is None else bound_(logits, chunks.bound, with_slopes=factors is not None)
        log_q = chunks.log_softmax(logits if temperature == 1 else logits.to(chunks.wide) / temperature)
        divergences[rows], drawn_to = distillation.taught.divergences(rows, log_q, temperature)
        # At temperature 1 both are equal.
        log_one = log_q if temperature == 1 else chunks.log_softmax(logits)
        log_probabilities[rows] = log_one.gather(1, targets[rows, None])[:, 0]
        one = log_one.exp()
        entropies[rows] = -(one * log_one).sum(dim=1)
        if factors is not None:
            with early_gradient():
                # The gradient of -(1 - w) · log p + w · τ² · KL with respect to the logits.
                gradient = one.mul_(1 - w)
                gradient.scatter_add_(1, targets[rows, None], torch.full_like(gradient[:, :1], w - 1))
                gradient.add_(log_q.exp_().sub_(drawn_to), alpha=w * temperature)
                if slopes is not None:
                    gradient *= slopes
                total.add(rows, gradient, factors[rows])
            del gradient
        # Else they would live until the next chunk's are there.
        del logits, slopes, log_q, log_one, drawn_to, one
    return log_probabilities, entropies, divergences, total.hidden, total.weight
