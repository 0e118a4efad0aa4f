"""The scan by chunks is the recurrence over tokens, forward and backward, also from a state and between documents."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from napkin.accounting.counting import count
from napkin.kernels.recurrences.convolution import causal_convolution
from napkin.kernels.recurrences.state_space import chunked_scan, plain_scan, scan_step


def arguments(dtype: torch.dtype, *, length: int = 37, groups: int = 2, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values, log decays and a state of two sequences with four heads."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    decays = -torch.rand(2, length, 4, generator=generator, dtype=dtype)
    made = [drawn(2, length, groups, 5), drawn(2, length, groups, 5), drawn(2, length, 4, 6), decays, drawn(2, 4, 5, 6)]
    return [each.requires_grad_() for each in made]


def results(scan: Callable[..., tuple[Tensor, Tensor]], given: list[Tensor], **how: Any) -> list[Tensor]:
    """Outputs, last state, and the gradients of a sum over both with weights that are not alike."""
    *tokens, state = given
    outputs, last = scan(*tokens, state=state, **how)
    weighted = [
        (each * torch.arange(each.numel(), dtype=each.dtype).view_as(each).sin()).sum() for each in (outputs, last)
    ]
    return [outputs.detach(), last.detach(), *torch.autograd.grad(weighted[0] + weighted[1], given)]


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_the_scan_by_chunks_equals_the_recurrence_over_tokens(
    dtype: torch.dtype, error: float, with_documents: bool, groups: int
) -> None:
    given, how = arguments(dtype, groups=groups), {}
    if with_documents:
        # The state is of the first sequence's first document, and of none of the second's.
        documents = torch.tensor([[0] * 3 + [1] * 13 + [2] + [3] * 20, [4] * 24 + [5] * 13])
        how = {"documents": documents, "document_before": torch.tensor([0, 1])}
    wanted = results(plain_scan, given, **how)
    for found, expected in zip(results(chunked_scan, given, chunk=8, **how), wanted, strict=True):
        assert (found - expected).norm() <= error * expected.norm()


def test_the_gradient_of_the_scan_by_chunks_is_that_of_finite_differences() -> None:
    given = arguments(torch.float64, length=7)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]])

    def scan(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        *tokens, state = tensors
        return chunked_scan(*tokens, state=state, documents=documents, chunk=3)

    assert torch.autograd.gradcheck(scan, given, fast_mode=True)


def test_a_document_in_a_sequence_is_computed_as_by_itself() -> None:
    queries, keys, values, decays, _ = (each.detach() for each in arguments(torch.float64))
    documents = torch.tensor([0] * 9 + [1] * 28).expand(2, -1)
    outputs, last = chunked_scan(queries, keys, values, decays, documents=documents, chunk=8)
    alone, last_alone = chunked_scan(*(each[:, 9:] for each in (queries, keys, values, decays)), chunk=8)
    torch.testing.assert_close(outputs[:, 9:], alone)
    torch.testing.assert_close(last, last_alone)
    joined, _ = chunked_scan(queries, keys, values, decays, chunk=8)
    assert not torch.allclose(joined[:, 9:], alone, atol=1e-3)


def test_a_step_after_a_step_is_the_recurrence() -> None:
    queries, keys, values, decays, state = (each.detach() for each in arguments(torch.float64, length=5))
    wanted, last = plain_scan(queries, keys, values, decays, state=state)
    for t in range(5):
        y, state = scan_step(queries[:, t], keys[:, t], values[:, t], decays[:, t], state)
        torch.testing.assert_close(y, wanted[:, t])
    torch.testing.assert_close(state, last)


def test_strong_decays_neither_overflow_nor_leave_anything() -> None:
    queries, keys, values, decays, _ = (each.detach() for each in arguments(torch.float32))
    outputs, last = chunked_scan(queries, keys, values, 1000 * decays - 100, chunk=16)
    own = (queries * keys).sum(-1).repeat_interleave(2, dim=2)[..., None] * values
    torch.testing.assert_close(outputs, own)
    assert bool(last.isfinite().all())


class CallCounter(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_a_step_by_chunks_calls_a_fifth_of_the_operators_of_the_recurrence_at_most() -> None:
    calls = []
    for scan in (plain_scan, chunked_scan):
        with CallCounter() as counter:
            results(scan, arguments(torch.float32, length=128))
        calls.append(counter.calls)
    assert calls[0] >= 5 * calls[1]


@pytest.mark.parametrize("groups", [1, 2])
def test_the_products_of_a_scan_are_those_of_the_closed_form(groups: int) -> None:
    # T tokens in chunks of Q, H heads of P, G groups, states of N · P: forward 2·T·(G·Q·N + H·Q·P + 2·H·N·P), backward
    # scores, weights and reading are computed again.
    batch, length, heads, width, states, chunk = 2, 64, 4, 6, 5, 16
    given = arguments(torch.float32, length=length, groups=groups)
    ledger = count(
        torch.nn.Identity(),
        torch.zeros(1),
        lambda module, _: torch.stack(
            [each.sum() for each in results(lambda *x, **how: chunked_scan(*x, chunk=chunk, **how), given)]
        ).sum(),
        warm_up=0,
    )
    by_group, by_head = groups * chunk * states, heads * chunk * width
    forward, backward = (
        by_group + by_head + 2 * heads * states * width,
        3 * by_group + 2 * by_head + 5 * heads * states * width,
    )
    assert ledger.flops == 2 * batch * length * (forward + backward)


@pytest.mark.parametrize("with_documents", [False, True])
def test_the_convolution_is_its_sum_over_taps(with_documents: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias, before = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 9, 3), (3, 1, 4), (3,), (2, 3, 3))
    )
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 3, 3, 3], [0] * 9]) if with_documents else None
    own = torch.tensor([0, 5]) if with_documents else None
    found = causal_convolution(x, weight, bias, before=before, documents=documents, document_before=own)
    for b in range(2):
        for t in range(9):
            total = bias.clone()
            for tap in range(4):
                at = t - 3 + tap
                if at >= 0:
                    seen = documents is None or documents[b, at] == documents[b, t]
                    total += weight[:, 0, tap] * x[b, at] * seen
                else:
                    seen = documents is None or own is None or own[b] == documents[b, t]
                    total += weight[:, 0, tap] * before[b, 3 + at] * seen
            torch.testing.assert_close(found[b, t], total)
