"""Products of experts and with integers as compiled for compute capability 8.0 and 9.0, against fp64."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from napkin.kernels.products.grouped import fused_grouped_matmul, grouped_matmul_reference
from napkin.kernels.products.linear import fp8_quantize_reference
from napkin.kernels.products.quantized import quantized_product
from napkin.kernels.triton_tiles import ProductTile, forced
from napkin.model.quantized import Int4Linear, Int8Linear
from oracles.ptx.launches import executing_ptx

SMALL = ProductTile(rows=16, columns=32, depth=16, warps=1, stages=2)
"""Products in fp32 take an instruction for each number of a thread."""


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_rounding_to_fp8_is_that_of_torch_to_the_bit(dtype: torch.dtype, gradient: bool) -> None:
    from napkin.kernels.products.triton_fp8 import fp8_quantize

    x = torch.randn(33, 129, generator=torch.Generator().manual_seed(0)).to(dtype)
    with executing_ptx(90) as executed:
        found, scale = fp8_quantize(x, gradient)
    expected, expected_scale = fp8_quantize_reference(x, gradient)
    assert scale == expected_scale
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert [each.kernel for each in executed] == ["largest_kernel", "round_kernel"]


@contextmanager
def tf32(*, allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(
    ("sizes", "dtype", "bound", "tile", "capability"),
    [
        ([70, 5, 64], torch.bfloat16, 3e-2, None, 80),
        ([0, 3, 0, 90, 0], torch.float16, 4e-3, None, 80),
        ([70, 0, 5], torch.bfloat16, 3e-2, None, 90),
        ([20, 0, 3], torch.float32, 1e-5, SMALL, 80),
        ([20, 0, 3], torch.float32, 4e-3, SMALL, 80),
    ],
    ids=["bf16", "fp16", "bf16, Hopper", "fp32", "tf32"],
)
def test_compiled_grouped_products_and_their_gradients(
    sizes: list[int], dtype: torch.dtype, bound: float, tile: ProductTile | None, capability: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 45, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(len(sizes), 70, 45, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    starts = torch.tensor([0, *sizes]).cumsum(0)[:-1]
    wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = grouped_matmul_reference(*wide, starts)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64).to(dtype)
    expected_grads = torch.autograd.grad(expected, wide, upstream.double())
    tiles = {} if tile is None else dict.fromkeys(("grouped product", "grouped outer product"), tile)
    with ExitStack() as stack:
        executed = stack.enter_context(executing_ptx(capability))
        stack.enter_context(tf32(allowed=bound > 1e-5))
        for kernel, each in tiles.items():
            stack.enter_context(forced(kernel, each))
        actual = fused_grouped_matmul(x, weight, starts)
        grads = torch.autograd.grad(actual, (x, weight), upstream)
    for mine, theirs in zip((actual, *grads), (expected, *expected_grads), strict=True):
        assert (mine - theirs).abs().max() <= bound * theirs.detach().abs().max()
    assert [each.kernel for each in executed] == ["matmul_kernel", "matmul_kernel", "outer_kernel"]
    product = "wgmma.mma_async" if capability == 90 else "mma.sync"
    assert all((product in each.ptx) == (bound > 1e-5) for each in executed)


@pytest.mark.parametrize(
    ("n", "rows", "columns", "dtype", "capability"),
    [(1, 64, 64, torch.bfloat16, 90), (5, 40, 96, torch.float16, 80), (33, 33, 130, torch.bfloat16, 80)],
)
@pytest.mark.parametrize("bits", [8, 4])
def test_compiled_products_with_integers_are_those_of_the_weights(
    n: int, rows: int, columns: int, dtype: torch.dtype, capability: int, bits: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix, x = (torch.randn(shape, generator=generator) for shape in ((rows, columns), (n, columns)))
    if bits == 8:
        tensors = Int8Linear.quantized(matrix)
        values, scales, middles = tensors["values"], tensors["scales"].to(dtype), None
        weight = values.double() * scales.double()[:, None]
    else:
        tensors = Int4Linear.quantized(matrix, 64)
        values, scales, middles = tensors["values"], tensors["scales"].to(dtype), tensors["middles"].to(dtype)
        integers = torch.stack((values & 15, values >> 4), dim=2).flatten(1).unflatten(1, (-1, 64)).double() - 8
        weight = (integers * scales.double()[..., None] + middles.double()[..., None]).flatten(1)[:, :columns]
    x = x.to(dtype)
    with executing_ptx(capability) as executed:
        found = quantized_product(x, values, scales, middles)
    expected = x.double() @ weight.T
    bound = {torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert (found - expected).abs().max() <= bound * expected.abs().max()
    assert [each.kernel for each in executed] == [f"int{bits}_kernel"]
