"""Log-probabilities and entropies of a fused head beside autograd in float64 over all logits."""

import pytest
import torch
from torch import Tensor

from napkin.kernels.loss.log_probabilities import entropies, linear_log_probabilities, log_probabilities
from oracles.allocator import growth_at_peak

N, D_MODEL, VOCAB_SIZE = 50, 16, 37


def problem(dtype: torch.dtype = torch.float32, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, D_MODEL, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB_SIZE, D_MODEL, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCAB_SIZE, (n,), generator=generator)


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies by autograd over all logits."""
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = (logits / temperature).log_softmax(1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)


FORMS = pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])


@FORMS
@pytest.mark.parametrize("chunk_size", [7, 512])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("reads", ["log-probabilities", "entropies", "both"])
def test_values_and_gradients_are_those_of_all_logits_in_float64(
    compiled: bool, chunk_size: int, softcap: float | None, temperature: float, reads: str
) -> None:
    hidden, weight, targets = problem()
    found = linear_log_probabilities(
        hidden,
        weight,
        targets,
        temperature=temperature,
        logit_softcap=softcap,
        chunk_size=chunk_size,
        compiled=compiled,
    )
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    expected = reference(exact[0], exact[1], targets, temperature, softcap)
    outputs = found.log_probabilities, found.entropies
    for one, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    factors = torch.randn(2, N, generator=torch.Generator().manual_seed(1))
    chosen = [i for i, name in enumerate(("log-probabilities", "entropies")) if reads in (name, "both")]
    torch.stack([outputs[i] @ factors[i] for i in chosen]).sum().backward()
    torch.stack([expected[i] @ factors[i].double() for i in chosen]).sum().backward()
    for one, other in zip((hidden, weight), exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).norm() < 1e-6 * other.grad.norm()


@FORMS
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, 3.0)])
@pytest.mark.parametrize("largest", [1.0, 0.0, 1e-20])
def test_a_sum_with_known_coefficients_has_the_gradients_of_log_probabilities(
    compiled: bool, temperature: float, softcap: float | None, largest: float
) -> None:
    hidden, weight, targets = problem()
    coefficients = largest * torch.randn(N, generator=torch.Generator().manual_seed(1))
    found = linear_log_probabilities(
        hidden,
        weight,
        targets,
        coefficients,
        temperature=temperature,
        logit_softcap=softcap,
        chunk_size=16,
        compiled=compiled,
    )
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    log_probabilities, entropies = reference(exact[0], exact[1], targets, temperature, softcap)
    torch.testing.assert_close(found.log_probabilities.double(), log_probabilities.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropies.double(), entropies.detach(), rtol=1e-5, atol=1e-5)
    assert not found.log_probabilities.requires_grad
    assert found.weighted_sum is not None
    expected = coefficients.double() @ log_probabilities
    assert found.weighted_sum.item() == pytest.approx(expected.item(), rel=1e-5)
    (3 * found.weighted_sum).backward()
    (3 * expected).backward()
    for one, other in zip((hidden, weight), exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).norm() <= 1e-6 * other.grad.norm()
    with torch.no_grad():
        without = linear_log_probabilities(hidden, weight, targets, coefficients, temperature=temperature)
    assert without.weighted_sum is not None
    assert not without.weighted_sum.requires_grad


@FORMS
@pytest.mark.parametrize("early", [False, True], ids=["recomputed", "early"])
def test_under_bf16_autocast_it_is_as_close_to_exact_as_bf16_logits(compiled: bool, early: bool) -> None:
    hidden, weight, targets = problem(n=200)
    coefficients = torch.rand(200, generator=torch.Generator().manual_seed(1))
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    (reference(exact[0], exact[1], targets, 1.0, None)[0] @ coefficients.double()).backward()
    rival = [each.detach().clone().requires_grad_() for each in (hidden, weight)]
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_log_probabilities(
            hidden, weight, targets, coefficients if early else None, chunk_size=64, compiled=compiled
        )
        loss = found.weighted_sum if early else found.log_probabilities @ coefficients
        logits = rival[0] @ rival[1].T
    assert found.log_probabilities.dtype == torch.float32
    assert loss is not None
    loss.backward()
    (logits.float().log_softmax(1).gather(1, targets[:, None])[:, 0] @ coefficients).backward()
    for one, other, right in zip((hidden, weight), rival, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert right.grad is not None
        error, of_rival = (one.grad - right.grad).norm(), (other.grad - right.grad).norm()
        assert 0 < error < max(1.5 * of_rival.item(), 2**-8 * right.grad.norm().item())


@FORMS
@pytest.mark.parametrize("early", [False, True], ids=["recomputed", "early"])
def test_no_tokens_have_no_gradient(compiled: bool, early: bool) -> None:
    hidden, weight, targets = problem(n=0)
    coefficients = torch.zeros(0)
    found = linear_log_probabilities(hidden, weight, targets, coefficients if early else None, compiled=compiled)
    loss = found.weighted_sum if early else found.log_probabilities.sum() + found.entropies.sum()
    assert loss is not None
    loss.backward()
    assert weight.grad is not None
    assert (loss.item(), weight.grad.norm().item()) == (0, 0)


@pytest.mark.parametrize("trained", ["hidden", "weight"])
@pytest.mark.parametrize("early", [False, True], ids=["recomputed", "early"])
def test_a_frozen_side_takes_no_gradient_and_leaves_the_other_exact(trained: str, early: bool) -> None:
    gradients = []
    for frozen in (False, True):
        hidden, weight, targets = problem()
        (weight if trained == "hidden" else hidden).requires_grad_(not frozen)
        found = linear_log_probabilities(hidden, weight, targets, torch.ones(N) if early else None)
        loss = found.weighted_sum if early else found.log_probabilities.sum()
        assert loss is not None
        loss.backward()
        gradients.append((hidden if trained == "hidden" else weight).grad)
        assert not frozen or (weight if trained == "hidden" else hidden).grad is None
    assert torch.equal(*gradients)


def test_entropies_that_no_loss_reads_change_nothing() -> None:
    gradients = []
    for read in (0.0, None):
        hidden, weight, targets = problem()
        found = linear_log_probabilities(hidden, weight, targets, chunk_size=16)
        (found.log_probabilities.sum() + (0 if read is None else read * found.entropies.sum())).backward()
        gradients.append(torch.cat([hidden.grad.flatten(), weight.grad.flatten()]))  # pyright: ignore[reportOptionalMemberAccess]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_it_holds_two_chunks_of_logits_at_most() -> None:
    n, d_model, vocab_size, chunk = 2048, 8, 1024, 64
    hidden = torch.randn(n, d_model, requires_grad=True)
    weight = torch.randn(vocab_size, d_model, requires_grad=True)
    targets = torch.zeros(n, dtype=torch.int64)

    def step(coefficients: Tensor | None) -> None:
        found = linear_log_probabilities(hidden, weight, targets, coefficients, chunk_size=chunk)
        loss = found.log_probabilities.sum() if found.weighted_sum is None else found.weighted_sum
        loss.backward()

    logits_of_a_chunk = 4 * chunk * vocab_size
    # The gradients, and values of each token.
    rest = 2 * 4 * d_model * (n + vocab_size) + 16 * 4 * n
    for coefficients in (None, torch.ones(n)):
        assert growth_at_peak(lambda: step(coefficients))[0] < 2 * logits_of_a_chunk + rest  # noqa: B023
    assert 2 * logits_of_a_chunk + rest < 4 * n * vocab_size / 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_plain_forms_of_logits_are_those_of_autograd_also_where_nothing_is_likely(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(2, 5, 11, generator=generator)).to(dtype)
    logits[0, 0, 3:] = -torch.inf
    logits[1, 2] += 100
    targets = torch.randint(3, (2, 5), generator=generator)
    given, twin = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = log_probabilities(given, targets), entropies(given)
    p = twin.exp() / twin.exp().sum(-1, keepdim=True)
    # x · log(x) is 0 at 0; `xlogy` says so.
    wanted = p.gather(-1, targets[..., None])[..., 0].log(), -torch.special.xlogy(p, p.clamp(min=1e-300)).sum(-1)
    for mine, expected in zip(found, wanted, strict=True):
        assert mine.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(mine.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(2, 2, 5, generator=generator)
    own, others = (
        torch.autograd.grad((a * weights[0]).sum() + (b * weights[1]).sum(), x)[0]
        for (a, b), x in ((found, given), (wanted, twin))
    )
    assert bool(own.isfinite().all())
    torch.testing.assert_close(
        own.double(), others.nan_to_num(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-9, atol=1e-3
    )
