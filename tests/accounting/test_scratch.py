from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from napkin.accounting.scratch import hides_products, measured_scratch, scratch_bytes
from napkin.machine_code.processor import has_amx
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
        self.bytes = max(self.bytes, _counted(func, args, kwargs or {}, inputs))
        return func(*args, **kwargs or {})


def _counted(func: Any, args: tuple, kwargs: dict, inputs: list[Tensor]) -> int:
    known = scratch_bytes(func, args, kwargs, inputs)
    if known is not None and not hides_products(func, inputs):
        return known
    mode = FakeTensorMode()
    fakes = pytree.tree_map_only(Tensor, lambda tensor: mode.from_tensor(tensor.detach()), (args, kwargs))
    tensors = [leaf for leaf in pytree.tree_leaves(fakes) if isinstance(leaf, Tensor)]
    measured = measured_scratch(func, fakes[0], fakes[1], tensors, [], 0)
    assert measured is not None
    return measured[0]


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
    _agree(call)


FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
NUMBER_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
LENGTHS = (1, 20, 63, 64, 65, 96, 191, 192, 300, 511, 513, 600, 767, 768, 900, 1025)
HEAD_DIMS = (16, 17, 32, 33, 64, 80, 127, 128)


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_scratch_of_attention_is_what_the_allocator_gives_and_takes_back(
    dtype: torch.dtype, n_threads: int, monkeypatch: pytest.MonkeyPatch
):
    torch.set_num_threads(n_threads)
    random = Random(n_threads)
    packed = []
    for _ in range(40):
        queries, keys, n_kv_heads = random.choice(LENGTHS), random.choice(LENGTHS), random.choice((1, 2, 3))
        n_heads, head_dim = n_kv_heads * random.choice((1, 2)), random.choice(HEAD_DIMS)
        sizes = ((queries, n_heads), (keys, n_kv_heads), (keys, n_kv_heads))
        # The layout in which a layer has its heads.
        inputs = [torch.ones(2, length, heads, head_dim, dtype=dtype).transpose(1, 2) for length, heads in sizes]
        call = partial(FLASH_ATTENTION, *inputs, is_causal=random.random() < 0.5)
        scratch = _agree(call, within=0)
        # Without oneDNN attention packs nothing, on any processor.
        with monkeypatch.context() as context:
            context.setattr(torch.backends.mkldnn, "enabled", False)
            packed.append(_agree(call, within=0) < scratch)
    # Where the processor has tiles for the format, some of these shapes are packed and some are not.
    has_tiles = dtype in NUMBER_FORMATS and has_amx(NUMBER_FORMATS[dtype])
    assert set(packed) == ({True, False} if has_tiles else {False})


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scratch_of_attention_backwards_is_what_the_allocator_gives_and_takes_back(dtype: torch.dtype):
    for queries, keys in product((20, 96, 300, 900), (24, 600)):
        heads = (torch.ones(2, length, 3, 32, dtype=dtype).transpose(1, 2) for length in (queries, keys, keys))
        leaves = q, k, v = [part.requires_grad_() for part in heads]
        output = F.scaled_dot_product_attention(q, k, v)
        # The layout in which a layer has its heads, and the plain one, of which a copy is made.
        for gradient in (torch.ones_like(output), torch.ones(output.shape, dtype=dtype)):
            _agree(partial(torch.autograd.grad, output, leaves, gradient, retain_graph=True), within=SMALL + 300 * 8)


def _agree(call: Callable[[], Any], *, within: int = SMALL) -> int:
    """Hold the scratch that is counted for a call to what the allocator saw, and return it."""
    with _LargestScratch() as counted:
        call()
    results: list[Any] = []
    growth, _ = growth_at_peak(lambda: results.extend(pytree.tree_leaves(call())))
    outputs = sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in results}.values())
    assert growth - outputs == pytest.approx(counted.bytes, abs=within), call
    return counted.bytes
