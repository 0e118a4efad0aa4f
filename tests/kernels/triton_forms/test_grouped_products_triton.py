"""Grouped products in Triton's interpreter against one product after another in fp64."""

import pytest
import torch

from napkin.kernels.products.grouped import fused_grouped_matmul, grouped_matmul_reference


@pytest.mark.parametrize("sizes", [[70, 5, 64], [0, 3, 0, 130, 0], [9]], ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 4e-3)])
def test_groups_of_any_size_have_their_products_and_gradients(
    sizes: list[int], dtype: torch.dtype, bound: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 45, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(len(sizes), 70, 45, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    starts = torch.tensor([0, *sizes]).cumsum(0)[:-1]
    wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    actual, expected = fused_grouped_matmul(x, weight, starts), grouped_matmul_reference(*wide, starts)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64).to(dtype)
    grads = torch.autograd.grad(actual, (x, weight), upstream)
    expected_grads = torch.autograd.grad(expected, wide, upstream.double())
    for mine, theirs in zip((actual, *grads), (expected, *expected_grads), strict=True):
        assert (mine - theirs).abs().max() <= bound * theirs.detach().abs().max()
