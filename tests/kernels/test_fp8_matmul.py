import pytest
import torch

from napkin.accounting.recording import record
from napkin.kernels.products.linear import fp8_linear, fp8_linear_emulated


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = 2 ** torch.ceil(torch.log2(x.abs().max() / torch.finfo(dtype).max))
    return ((x / scale).to(dtype).double()) * scale.double()


@pytest.mark.parametrize("native", [False, True])
def test_products_are_of_numbers_rounded_to_fp8(native: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(48, 32, generator=generator) * 32**-0.5).requires_grad_()
    multiply = fp8_linear if native else fp8_linear_emulated
    x = torch.randn(4, 16, 32, generator=generator, requires_grad=True)
    gradient = torch.randn(4, 16, 48, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        y = multiply(x, weight, None)
    y.backward(gradient.to(y.dtype))
    rows, w = (
        rounded(x.detach().flatten(0, 1), torch.float8_e4m3fn),
        rounded(weight.detach(), torch.float8_e4m3fn),
    )
    g = rounded(gradient.bfloat16().float().flatten(0, 1), torch.float8_e5m2)
    assert x.grad is not None and weight.grad is not None  # noqa: PT018
    for found, expected in (
        (y.flatten(0, 1), rows @ w.T),
        (x.grad.flatten(0, 1), g @ w),
        (weight.grad, g.T @ rows),
    ):
        # The product is rounded to bf16, its scale too.
        assert (found.double() - expected).abs().max() < 0.015 * expected.abs().max()
    assert y.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32


def test_the_hardwares_product_rounds_each_tensor_in_one_operator() -> None:
    x, weight = torch.randn(16, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    ledger = record(torch.nn.Identity(), lambda: fp8_linear(x, weight, None).float().sum().backward(), warm_up=0)
    rounded = [row for row in ledger.rows if row.operator == "fp8_quantize"]
    # The input and the weight in fp32, the gradient in bf16; a byte per number, and the scale.
    assert [(row.bytes_read, row.bytes_written) for row in rounded] == [(2048, 516), (6144, 1540), (1536, 772)]
    assert not ledger.unknown_operators
