import pytest
import torch
from torch import Tensor

from napkin.kernels.products.linear import (
    compiled_int8_linear,
    int8_linear,
    int8_linear_emulated,
    quantize_rows,
    restore_rows,
)
from napkin.machine_code.processor import has_exact_int8

own = torch.ops.napkin
with_int8 = pytest.mark.skipif(not has_exact_int8(), reason="int8 is not multiplied exactly here")
FORMS = [
    int8_linear_emulated,
    pytest.param(int8_linear, marks=with_int8),
    pytest.param(compiled_int8_linear, marks=with_int8),
]


def rounded(x: Tensor) -> Tensor:
    """Rows rounded to multiples of their largest number over 127, in float64."""
    scale = x.double().abs().amax(dim=1, keepdim=True) / 127
    return (x.double() / scale).round() * scale


def close(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    # Products are rounded to bf16, those of the emulation twice; a number between two integers may go either way.
    assert (found.double() - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize("multiply", FORMS)
def test_products_are_of_rows_rounded_to_int8(multiply) -> None:
    generator = torch.Generator().manual_seed(0)
    # More rows than are multiplied at a time; rows of very different size.
    x = torch.randn(6, 100, 32, generator=generator) * torch.logspace(-3, 3, 100)[:, None]
    weight = torch.randn(48, 32, generator=generator) * torch.logspace(-1, 1, 48)[:, None]
    bias = torch.randn(48, generator=generator)
    gradient = torch.randn(6, 100, 48, generator=generator).bfloat16()
    for each in (x, weight, bias):
        each.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = multiply(x, weight, bias)
    y.backward(gradient)
    rows, w = rounded(x.detach().flatten(0, 1)), rounded(weight.detach())
    scales = weight.detach().double().abs().amax(dim=1) / 127
    g = gradient.double().flatten(0, 1)
    close(y.detach().flatten(0, 1), rows @ w.T + bias.detach().double())
    # The scales of outputs are in the gradient, not in the weights, when it is rounded.
    assert x.grad is not None
    close(x.grad.flatten(0, 1), rounded(g * scales) @ (w / scales[:, None]))
    close(weight.grad, g.T @ rows)
    close(bias.grad, g.sum(dim=0))
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_factors", [False, True])
def test_compiled_rounding_equals_the_formula_bit_for_bit(dtype: torch.dtype, with_factors: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(130, 77, generator=generator).to(dtype)
    x[3] = 0
    x[4, 5] = float("nan")
    factors = torch.rand(77, generator=generator) if with_factors else None
    numbers, scales = own.int8_quantize(x, factors)
    expected, expected_scales = quantize_rows(x, factors)
    finite = torch.arange(130) != 4
    assert torch.equal(numbers[finite], expected[finite])
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
    restored = own.int8_restore(numbers, scales)
    assert torch.equal(restored[finite], restore_rows(expected, expected_scales)[finite])
    # A number that is not finite is not lost.
    assert restored[4].isnan().all()


@with_int8
def test_sums_of_products_are_exact() -> None:
    # 127² · 4096 exceeds what fp32 counts one by one.
    left = torch.full((600, 4096), 127, dtype=torch.int8)
    left[:, 0] = 126
    right = torch.full((4096, 16), 127, dtype=torch.int8)
    exact = 127 * 127 * 4095 + 126 * 127
    scales, columns = torch.full((600,), 1.0), torch.full((16,), 2.0**-12)
    found = own.int8_product(left, right, scales, columns)
    assert torch.equal(found, torch.full((600, 16), exact * 2.0**-12).bfloat16())


@with_int8
def test_operators_are_traced_as_they_compute() -> None:
    x, weight = torch.randn(40, 32), torch.randn(16, 32)
    numbers, scales = own.int8_quantize(x, None)
    w, columns = own.int8_quantize(weight, None)
    calls = {
        own.int8_quantize: [(x.bfloat16(), torch.rand(32)), (x, None)],
        own.int8_restore: [(numbers, scales)],
        own.int8_product: [(numbers, w.T, scales, columns), (numbers, w.T.contiguous(), scales, None)],
    }
    for operator, cases in calls.items():
        for arguments in cases:
            torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
