import pytest
import torch
from torch import Tensor

from napkin.kernels.products.grouped import (
    grouped_matmul,
    grouped_matmul_by_torch,
    grouped_matmul_reference,
    grouped_outer_by_torch,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sizes", [[3, 0, 5, 2], [0, 0, 10, 0], [10, 0, 0, 0], [2, 3, 4, 1]])
def test_a_grouped_product_and_its_gradients_equal_those_group_by_group(sizes: list[int]) -> None:
    x, weight = normal(10, 6).requires_grad_(), normal(4, 5, 6, seed=1).requires_grad_()
    starts = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)
    parts = [rows @ matrix.T for rows, matrix in zip(x.split(sizes), weight, strict=True)]
    actual, expected, upstream = grouped_matmul(x, weight, starts), torch.cat(parts), normal(10, 5, seed=2)
    assert torch.equal(grouped_matmul_reference(x, weight, starts), expected)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(actual, (x, weight), upstream),
        torch.autograd.grad(expected, (x, weight), upstream),
        rtol=1e-6,
        atol=1e-6,
    )
    # A sum's gradient has no storage of its own.
    assert torch.autograd.grad(grouped_matmul(x, weight, starts).sum(), x)[0].shape == x.shape


@pytest.mark.parametrize("sizes", [[3, 0, 5, 2], [0, 0, 10, 0], [10, 0, 0, 0], [2, 3, 4, 1]])
def test_torchs_product_of_groups_is_given_the_same_groups(sizes: list[int]) -> None:
    x, weight = normal(10, 16).bfloat16(), normal(4, 8, 16, seed=1).bfloat16()
    starts, gradient = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes), normal(10, 8, seed=2).bfloat16()
    parts = [rows.double() @ matrix.double().T for rows, matrix in zip(x.split(sizes), weight, strict=True)]
    outer = [g.double().T @ rows.double() for g, rows in zip(gradient.split(sizes), x.split(sizes), strict=True)]
    found = grouped_matmul_by_torch(x, weight, starts), grouped_outer_by_torch(gradient, x, starts)
    for made, expected in zip(found, (torch.cat(parts), torch.stack(outer)), strict=True):
        assert made.dtype == torch.bfloat16
        torch.testing.assert_close(made.double(), expected, rtol=0.01, atol=0.05)
    # The gradient of the input multiplies by matrices that are views.
    found = grouped_matmul_by_torch(gradient, weight.transpose(1, 2), starts)
    parts = [g.double() @ matrix.double() for g, matrix in zip(gradient.split(sizes), weight, strict=True)]
    torch.testing.assert_close(found.double(), torch.cat(parts), rtol=0.01, atol=0.05)


@pytest.mark.torture
def test_a_grouped_product_passes_torchs_own_checks_of_an_operator() -> None:
    x, weight = normal(10, 6).requires_grad_(), normal(4, 5, 6, seed=1).requires_grad_()
    torch.library.opcheck(torch.ops.napkin.grouped_matmul.default, (x, weight, torch.tensor([0, 3, 3, 8])))
