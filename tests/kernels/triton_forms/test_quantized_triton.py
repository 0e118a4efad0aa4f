"""Triton's products with integers, in Triton's interpreter, against the weights that these stand for."""

import pytest
import torch

from napkin.accounting.recording import record
from napkin.kernels.products.quantized import quantized_product
from napkin.model.quantized import Int4Linear, Int8Linear

SIZES = [(1, 64, 64), (5, 40, 96), (64, 33, 130), (70, 100, 257)]


def matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def vectors(n: int, columns: int) -> torch.Tensor:
    return torch.randn(n, columns, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("n", "rows", "columns"), SIZES)
def test_int8_products_are_those_of_the_weights(n: int, rows: int, columns: int) -> None:
    tensors, x = Int8Linear.quantized(matrix(rows, columns)), vectors(n, columns)
    weight = tensors["values"].double() * tensors["scales"].double()[:, None]
    found = quantized_product(x, tensors["values"], tensors["scales"], None)
    torch.testing.assert_close(found.double(), x.double() @ weight.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(("n", "rows", "columns"), SIZES)
def test_int4_products_are_those_of_the_weights(n: int, rows: int, columns: int, group_size: int) -> None:
    tensors, x = Int4Linear.quantized(matrix(rows, columns), group_size), vectors(n, columns)
    integers = torch.stack((tensors["values"] & 15, tensors["values"] >> 4), dim=2).flatten(1).double()
    groups = integers.unflatten(1, (-1, group_size)) - 8
    weight = groups * tensors["scales"].double()[..., None] + tensors["middles"].double()[..., None]
    found = quantized_product(x, tensors["values"], tensors["scales"], tensors["middles"])
    torch.testing.assert_close(found.double(), x.double() @ weight.flatten(1)[:, :columns].T, rtol=1e-5, atol=1e-4)


def test_a_product_is_one_operator_that_is_counted() -> None:
    tensors, x = Int4Linear.quantized(matrix(48, 64)), vectors(3, 64)
    arguments = tensors["values"], tensors["scales"], tensors["middles"]
    ledger = record(torch.nn.Identity(), lambda: quantized_product(x, *arguments), warm_up=0)
    assert [row.operator for row in ledger.rows] == ["quantized_product"]
    assert ledger.flops == 2 * 3 * 48 * 64
