from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from napkin.accounting.counting import count
from napkin.accounting.scratch import hides_products, measured_scratch, scratch_bytes
from napkin.kernels.attention.by_rows import compiled_attention, first_keys_of
from napkin.kernels.operator_forms import pinned_forms
from oracles.allocator import growth_at_peak

CPU = torch.device("cpu")
# Blocks of 256 queries in bf16 and of 128 in fp32: lengths end within a block.
LENGTH = 300
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "one block": {"length": 90},
    "grouped": {"n_kv_heads": 2},
    "window": {"window": 40},
    "documents": {"n_kv_heads": 1, "documents": True},
    "window, documents and cap": {"window": 70, "documents": True, "softcap": 2.0},
    "later queries": {"n_queries": 140, "n_kv_heads": 2, "window": 200},
    "cap of one block": {"length": 64, "softcap": 1.0, "n_kv_heads": 2},
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def problem(
    length: int = LENGTH,
    n_kv_heads: int = 4,
    n_queries: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    *,
    documents: bool = False,
    widths: tuple[int, int] = (16, 24),
) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    """Queries of four heads, keys, wider values, an upstream gradient, and the settings of compiled_attention."""
    generator = torch.Generator().manual_seed(0)
    n_queries = n_queries or length

    def heads(n: int, length: int, width: int) -> Tensor:
        # As a model has them: heads after positions in memory.
        return torch.randn(2, length, n, width, generator=generator).transpose(1, 2)

    ids = (torch.rand(2, length, generator=generator) < 0.02).cumsum(dim=1) if documents else None
    firsts = first_keys_of(ids, window, length, length - n_queries, CPU)
    width, value_width = widths
    inputs = [heads(4, n_queries, width), heads(n_kv_heads, length, width), heads(n_kv_heads, length, value_width)]
    return inputs, heads(4, n_queries, value_width), {"scale": 0.3, "softcap": softcap, "first_keys": firsts}


def attend(inputs: list[Tensor], settings: dict[str, Any]) -> Tensor:
    query, key, value = inputs
    return compiled_attention(query, key, value, **settings)


def by_hand(inputs: list[Tensor], scale: float, softcap: float | None, first_keys: Tensor) -> Tensor:
    """The same over all pairs in fp64."""
    query, key, value = (each.double() for each in inputs)
    key, value = (each.repeat_interleave(4 // key.shape[1], dim=1) for each in (key, value))
    scores = query @ key.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(key.shape[2])
    own = positions[key.shape[2] - query.shape[2] :, None]
    seen = (positions <= own) & (positions >= first_keys[:, None, :, None])
    return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ value


@pytest.mark.sampled(every=2)
@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_and_its_gradients_equal_those_of_all_pairs_in_float64(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    given, upstream, settings = problem(**case)
    inputs = [each.to(dtype).requires_grad_() for each in given]
    upstream = upstream.to(dtype)
    mixed = attend(inputs, settings)
    expected = by_hand(inputs, **settings)
    found = [mixed, *torch.autograd.grad(mixed, inputs, upstream)]
    for actual, wanted in zip(found, [expected, *torch.autograd.grad(expected, inputs, upstream)], strict=True):
        assert actual.dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(actual.double(), wanted.double(), rtol=1e-5, atol=1e-5)
        else:
            # Scores, weights and results are rounded to 2^-9 each.
            assert (actual.double() - wanted).norm() < 0.01 * wanted.norm()


@EVERY_CASE
@pytest.mark.parametrize("widths", [(64, 32), (32, 96)])
def test_in_tiles_results_are_closer_to_float64_as_scores_are_not_rounded(
    case: dict[str, Any], widths: tuple[int, int]
) -> None:
    given, upstream, settings = problem(**case, widths=widths)
    inputs, upstream = [each.bfloat16().requires_grad_() for each in given], upstream.bfloat16()
    with pinned_forms({"compiled_attention": "tiles"}):
        mixed = attend(inputs, settings)
        found = [mixed, *torch.autograd.grad(mixed, inputs, upstream)]
    expected = by_hand(inputs, **settings)
    for actual, wanted in zip(found, [expected, *torch.autograd.grad(expected, inputs, upstream)], strict=True):
        # Weights and results are rounded to 2^-9 each.
        assert (actual.double() - wanted).norm() < 0.004 * wanted.norm()


def test_tiles_read_heads_as_one_linear_layer_writes_them_and_take_no_scratch() -> None:
    together = torch.randn(3, 70, 8, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    query, key, value = (each.transpose(1, 2) for each in together.split((4, 2, 2), dim=2))
    settings = {"scale": 0.2, "softcap": None, "first_keys": first_keys_of(None, None, 70, 0, CPU)}
    with pinned_forms({"compiled_attention": "tiles"}):
        results: list[Tensor] = []
        _, grown = growth_at_peak(lambda: results.append(attend([query, key, value], settings)))
        apart = attend([each.contiguous() for each in (query, key, value)], settings)
        arguments = query, key, value, settings["first_keys"], 0.2, 0.0
        assert scratch_bytes(torch.ops.napkin.compiled_attention.default, arguments, {}, list(arguments[:4])) == 0
    assert torch.equal(results[0], apart)
    # The result, and a logsumexp of 4 bytes for each query of each head.
    assert grown == apart.nbytes + 4 * 3 * 4 * 70


def test_keys_that_are_not_seen_change_nothing_in_tiles() -> None:
    given, _, settings = problem(widths=(32, 32), documents=True, n_kv_heads=4)
    query, key, value = (each.bfloat16() for each in given)
    changed = [key.clone(), value.clone()]
    for each in changed:
        each[:, :, 200:] = 1e30
    with pinned_forms({"compiled_attention": "tiles"}):
        before, after = attend([query, key, value], settings), attend([query, *changed], settings)
    assert torch.equal(before[:, :, :200], after[:, :, :200])


def test_no_number_depends_on_the_number_of_threads() -> None:
    given, upstream, settings = problem(n_kv_heads=2, documents=True)
    inputs = [each.requires_grad_() for each in given]
    before, results = torch.get_num_threads(), []
    try:
        for n_threads in (1, 2):
            torch.set_num_threads(n_threads)
            mixed = attend(inputs, settings)
            results.append([mixed, *torch.autograd.grad(mixed, inputs, upstream)])
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def test_formats_without_a_compiled_loop_take_plain_attention() -> None:
    given, upstream, settings = problem(n_kv_heads=2, documents=True, window=50)
    inputs = [each.double().requires_grad_() for each in given]
    for cap in (None, 2.0):
        settings["softcap"] = cap
        mixed, expected = attend(inputs, settings), by_hand(inputs, **settings)
        torch.testing.assert_close(mixed, expected)
        torch.testing.assert_close(
            torch.autograd.grad(mixed, inputs, upstream.double()),
            torch.autograd.grad(expected, inputs, upstream.double()),
        )


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("case", ["one block", "grouped", "window, documents and cap", "later queries"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_scratch_is_what_the_allocator_gives_and_takes_back(case: str, dtype: torch.dtype) -> None:
    given, upstream, settings = problem(**CASES[case])
    inputs, upstream = [each.to(dtype) for each in given], upstream.to(dtype)
    forward = torch.ops.napkin.compiled_attention.default
    backward = torch.ops.napkin.compiled_attention_backward.default
    options = settings["first_keys"], settings["scale"], settings["softcap"] or 0.0
    logsumexps = forward(*inputs, *options)[1]
    calls = (forward, (*inputs, *options)), (backward, (upstream, *inputs, options[0], logsumexps, *options[1:]))
    for operator, arguments in calls:
        results: list[Any] = []

        def run(operator: Any = operator, arguments: Any = arguments, results: list[Any] = results) -> None:
            results.extend(operator(*arguments))

        _, grown = growth_at_peak(run)
        kept = sum(each.nbytes for each in results)
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        # The last block may be smaller than the one before it, and with it the first keys of its queries. What is
        # measured is measured on queries that see every earlier key.
        assert grown - kept == pytest.approx(scratch_of(operator, arguments, tensors), rel=0.005, abs=8 * 256)


def scratch_of(operator: Any, arguments: tuple, tensors: list[Tensor]) -> int:
    """By the formula, or measured where products inside of it take some too."""
    mode = FakeTensorMode()
    fakes = pytree.tree_map_only(Tensor, lambda tensor: mode.from_tensor(tensor.detach()), arguments)
    if not hides_products(operator, tensors):
        return scratch_bytes(operator, arguments, {}, tensors) or 0
    measured = measured_scratch(operator, fakes, {}, [each for each in fakes if isinstance(each, Tensor)], [], 0)
    return measured[0] if measured else 0


def test_all_pairs_are_counted_and_half_of_them_as_computed() -> None:
    inputs = [torch.empty(2, heads, 64, 16).requires_grad_() for heads in (4, 2, 2)]

    class Attention(torch.nn.Module):
        def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return compiled_attention(queries, keys, values)

    ledger = count(Attention(), inputs, lambda module, batch: module(*batch).sum().backward())
    pairs, causal = 64 * 64, 64 * 65 // 2
    products = 2 * 2 * 4 * 16
    assert ledger.flops == (2 + 4) * products * pairs
    assert ledger.causal_flops == (2 + 4) * products * causal
    assert ledger.hardware_flops == ledger.flops + products * pairs
