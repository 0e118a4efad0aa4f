import pytest
import torch

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
