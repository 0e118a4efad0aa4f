"""The loss of distillation beside torch's divergence of full logits, its gradients by autograd and by differences."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from napkin.kernels.loss.distillation import Distillation, LikeliestTokens, WholeDistributions, linear_distillation

N, D, V, D_TEACHER = 7, 5, 11, 6
CAP = 3.0


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


HIDDEN, WEIGHT, TEACHER, HEAD = (
    drawn(N, D, seed=1),
    drawn(V, D, seed=2),
    drawn(N, D_TEACHER, seed=3),
    drawn(V, D_TEACHER, seed=4),
)
TARGETS = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(5))
COEFFICIENTS = -drawn(N, seed=6).abs()


def bounded(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * (logits / cap).tanh()


def likeliest(temperature: float, k: int) -> LikeliestTokens:
    """What is kept of the teacher's full distributions, by its definition."""
    p = (TEACHER @ HEAD.T / temperature).softmax(1)
    values, ids = p.topk(k, dim=1)
    rest = (1 - values.sum(dim=1, keepdim=True)).clamp(min=0) * (k < V)
    return LikeliestTokens(ids.int(), torch.cat([values, rest], dim=1).log())


def in_autograd(hidden: Tensor, weight: Tensor, w: float, temperature: float, cap: float | None, k: int) -> Tensor:
    """-coefficients · the losses, from full logits; k likeliest tokens are outcomes of their own, the others one."""
    logits = bounded(hidden @ weight.T, cap)
    p = (bounded(TEACHER @ HEAD.T, cap if k == V else None) / temperature).softmax(1)
    q = (logits / temperature).softmax(1)
    if k < V:
        ids = p.topk(k, dim=1).indices
        p, q = (
            torch.cat([each.gather(1, ids), 1 - each.gather(1, ids).sum(1, keepdim=True)], dim=1) for each in (p, q)
        )
    divergences = kl_div(q.log(), p, reduction="none").sum(dim=1)
    losses = (1 - w) * cross_entropy(logits, TARGETS, reduction="none") + w * temperature**2 * divergences
    return -(COEFFICIENTS * losses).sum()


@pytest.mark.parametrize("chunk_size", [3, 100])
@pytest.mark.parametrize(
    ("w", "temperature", "cap", "k"),
    [(1.0, 1.0, None, V), (0.4, 2.5, CAP, V), (0.7, 0.6, None, 4), (1.0, 1.0, None, 1), (0.5, 3.0, CAP, 10)],
)
def test_loss_and_gradients_are_those_of_torch_on_full_logits(
    w: float, temperature: float, cap: float | None, k: int, chunk_size: int
) -> None:
    taught: Any = WholeDistributions(TEACHER, HEAD, cap) if k == V else likeliest(temperature, k)
    pairs = []
    for compute in (True, False):
        hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
        if compute:
            scores = linear_distillation(
                hidden,
                weight,
                TARGETS,
                Distillation(taught, w, temperature),
                COEFFICIENTS,
                chunk_size=chunk_size,
                logit_softcap=cap,
            )
            total = scores.weighted_sum
            assert total is not None
            logits = bounded(HIDDEN @ WEIGHT.T, cap)
            torch.testing.assert_close(-scores.log_probabilities, cross_entropy(logits, TARGETS, reduction="none"))
            torch.testing.assert_close(scores.entropies, torch.distributions.Categorical(logits=logits).entropy())
        else:
            # The sum is of what is made larger, the loss of what is made smaller.
            total = in_autograd(hidden, weight, w, temperature, cap, k)
        (2 * total).backward()
        pairs.append((total.detach(), hidden.grad, weight.grad))
    torch.testing.assert_close(pairs[0], pairs[1], rtol=1e-9, atol=1e-10)


def test_all_tokens_kept_are_the_whole_distribution_and_fewer_never_exceed_it() -> None:
    found = []
    for taught in (WholeDistributions(TEACHER, HEAD), *(likeliest(1.0, k) for k in (V, 8, 3, 1))):
        with torch.no_grad():
            found.append(linear_distillation(HIDDEN, WEIGHT, TARGETS, Distillation(taught, 1.0, 1.0)).divergences)
    torch.testing.assert_close(found[1], found[0])
    assert all((fewer <= more + 1e-12).all() for more, fewer in pairwise(found[1:]))
    assert (found[-1] > 0).all()


def test_the_gradient_is_that_of_differences() -> None:
    for taught in (WholeDistributions(TEACHER, HEAD, CAP), likeliest(2.0, 3)):
        hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()

        def total(hidden: Tensor, weight: Tensor, taught: Any = taught) -> Tensor:
            distillation = Distillation(taught, 0.6, 2.0)
            scores = linear_distillation(hidden, weight, TARGETS, distillation, COEFFICIENTS, chunk_size=2)
            if scores.weighted_sum is not None:
                return scores.weighted_sum
            # Without gradients there are only the terms.
            return COEFFICIENTS @ (0.4 * scores.log_probabilities - 0.6 * 2.0**2 * scores.divergences)

        total(hidden, weight).backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        along = drawn(N, D, seed=7), drawn(V, D, seed=8)
        step = 1e-5
        with torch.no_grad():
            ends = [total(HIDDEN + sign * step * along[0], WEIGHT + sign * step * along[1]) for sign in (1, -1)]
        slope = (hidden.grad * along[0]).sum() + (weight.grad * along[1]).sum()
        assert slope == pytest.approx(float(ends[0] - ends[1]) / (2 * step), rel=1e-6)


def test_a_student_that_equals_its_teacher_has_no_divergence_and_no_gradient() -> None:
    hidden, weight = TEACHER.clone().requires_grad_(), HEAD.clone().requires_grad_()
    distillation = Distillation(WholeDistributions(TEACHER, HEAD), 1.0, 1.5)
    scores = linear_distillation(hidden, weight, TARGETS, distillation, COEFFICIENTS)
    assert scores.divergences.abs().max() < 1e-12
    assert scores.weighted_sum is not None
    scores.weighted_sum.backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().max() < 1e-12
