from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from napkin.accounting.scratch import scratch_bytes
from oracles.allocator import growth_at_peak

# Numbers of no dimension and rows of statistics.
SMALL = 4096


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


class _LargestScratch(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.bytes = max(self.bytes, scratch_bytes(func, args, kwargs or {}, inputs))
        return func(*args, **kwargs or {})


WIDE, NARROW = torch.ones(300, 512), torch.ones(300, 512, dtype=torch.bfloat16)
ROW, SCALAR, MASK = torch.ones(512, dtype=torch.bfloat16), torch.tensor(2.0), torch.ones(300, 512, dtype=torch.bool)


@pytest.mark.parametrize(
    "call",
    [
        lambda: WIDE + NARROW,
        lambda: NARROW * WIDE,
        lambda: WIDE * ROW,
        lambda: WIDE * MASK,
        lambda: WIDE * SCALAR,
        lambda: NARROW * SCALAR,
        lambda: NARROW + NARROW,
        lambda: NARROW.clone().add_(WIDE),
        lambda: WIDE.clone().mul_(NARROW),
        lambda: torch.addcmul(WIDE, NARROW, NARROW),
        lambda: torch.where(MASK, NARROW, WIDE),
        lambda: torch.where(MASK, WIDE, WIDE),
        lambda: WIDE < NARROW,
        lambda: WIDE == WIDE,
        lambda: NARROW.sum(0, dtype=torch.float32),
        lambda: NARROW.sum(0),
        lambda: NARROW.mean(0),
        lambda: WIDE.mean(0),
        lambda: torch.linalg.vector_norm(NARROW, dtype=torch.float32),
        lambda: torch.ops.aten._foreach_norm([NARROW, NARROW[:100]], 2, dtype=torch.float32),
        lambda: WIDE.logsumexp(-1),
        lambda: NARROW.logsumexp(-1),
    ],
    ids=range(22),
)
def test_scratch_of_an_operator_is_what_the_allocator_gives_and_takes_back(call: Callable[[], Any]):
    kept: list[Any] = []
    _agree(lambda: kept.append(call()), lambda: kept[-1])


@pytest.mark.parametrize("queries", [20, 96, 300, 900])
@pytest.mark.parametrize("keys", [24, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scratch_of_attention_is_what_the_allocator_gives_and_takes_back(queries: int, keys: int, dtype: torch.dtype):
    # The layout in which a layer has its heads, and the plain one, of which the backward pass makes a copy.
    query, key, value = (torch.ones(2, length, 3, 32, dtype=dtype).transpose(1, 2) for length in (queries, keys, keys))
    kept: list[Any] = []
    _agree(
        lambda: kept.append(F.scaled_dot_product_attention(query, key, value)),
        lambda: kept[-1],
        beside=2 * 3 * queries * 8,
    )

    if dtype == torch.bfloat16:
        return  # inside are products of bf16
    leaves = q, k, v = [part.detach().requires_grad_() for part in (query, key, value)]
    output = F.scaled_dot_product_attention(q, k, v)
    for gradient in (torch.ones_like(output), torch.ones(output.shape, dtype=dtype)):
        _agree(
            lambda gradient=gradient: kept.append(torch.autograd.grad(output, leaves, gradient, retain_graph=True)),
            lambda: kept[-1],
            beside=300 * 8,
        )


def _agree(call: Callable[[], Any], result: Callable[[], Any], *, beside: int = 0) -> None:
    with _LargestScratch() as counted:
        call()
    growth, _ = growth_at_peak(call)
    results = pytree.tree_leaves(result())
    outputs = sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in results}.values())
    assert growth - outputs == pytest.approx(counted.bytes, abs=SMALL + beside)
