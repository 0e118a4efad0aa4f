"""The gated delta rule by chunks is the recurrence over tokens, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from napkin.kernels.recurrences.delta_rule import chunked_delta_rule, plain_delta_rule

DOCUMENTS = torch.tensor([[0] * 3 + [1] * 13 + [2] + [3] * 20, [4] * 24 + [5] * 13])


def arguments(dtype: torch.dtype, *, length: int = 37) -> list[Tensor]:
    """Queries, keys of length 1, values, log decays, rates, and a state of two sequences with four heads."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    keys = torch.nn.functional.normalize(drawn(2, length, 2, 5), dim=-1)
    decays, rates = -drawn(2, length, 4).abs() / 4, drawn(2, length, 4).sigmoid()
    made = [drawn(2, length, 2, 5), keys, drawn(2, length, 4, 6), decays, rates, drawn(2, 4, 5, 6)]
    return [each.detach().requires_grad_() for each in made]


def results(rule: Callable[..., tuple[Tensor, Tensor]], given: list[Tensor], **how: Any) -> list[Tensor]:
    *tokens, state = given
    outputs, last = rule(*tokens, state=state, **how)
    weights = (torch.arange(each.numel(), dtype=each.dtype).view_as(each).sin() for each in (outputs, last))
    weighted = sum((each * weight).sum() for each, weight in zip((outputs, last), weights, strict=True))
    assert isinstance(weighted, Tensor)
    return [outputs.detach(), last.detach(), *torch.autograd.grad(weighted, given)]


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("how", [{}, {"documents": DOCUMENTS, "document_before": torch.tensor([0, 1])}])
def test_the_delta_rule_by_chunks_equals_the_recurrence_over_tokens(
    dtype: torch.dtype, error: float, how: dict[str, Any]
) -> None:
    given = arguments(dtype)
    wanted = results(plain_delta_rule, given, **how)
    for found, expected in zip(results(chunked_delta_rule, given, chunk=8, **how), wanted, strict=True):
        assert (found - expected).norm() <= error * expected.norm()


def test_the_gradient_of_the_delta_rule_is_that_of_finite_differences() -> None:
    def rule(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        *tokens, state = tensors
        return chunked_delta_rule(*tokens, state=state, documents=DOCUMENTS[:, 10:18], chunk=3)

    assert torch.autograd.gradcheck(rule, arguments(torch.float64, length=8), fast_mode=True)


def test_a_rate_of_1_writes_the_value_under_its_key() -> None:
    _, keys, values, decays, rates, _ = (each.detach() for each in arguments(torch.float64))
    # All keys are the same: each value takes the place of the one before it, and a query of that key reads it.
    keys = keys[:, :1].expand_as(keys).contiguous()
    outputs, _ = chunked_delta_rule(keys, keys, values, decays, torch.ones_like(rates), chunk=16)
    torch.testing.assert_close(outputs, values)
