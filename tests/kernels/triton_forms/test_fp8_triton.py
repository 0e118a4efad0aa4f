"""Rounding to fp8 by Triton, in its interpreter, beside torch's operators.

The interpreter does not round to fp8 as a GPU does: it rounds ties away from zero, and loses the carry of a mantissa
that rounds up to two. So the numbers here are those of the format, times a power of two.
"""

import pytest
import torch

from napkin.kernels.products.linear import fp8_quantize_reference
from napkin.kernels.products.triton_fp8 import fp8_quantize


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("factor", [1.0, 2.0**-9, 448.0])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (16, 64), (33, 129), (70, 1000)])
def test_numbers_and_scale_are_those_of_torchs_operators(shape: tuple[int, int], factor: float, gradient: bool) -> None:
    drawn = factor * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rounded, scale = fp8_quantize_reference(drawn, gradient)
    given = (rounded.float() * scale).T
    for dtype in (torch.float32, torch.float16) if factor == 1.0 else (torch.float32,):
        found, expected = (form(given.to(dtype), gradient) for form in (fp8_quantize, fp8_quantize_reference))
        assert found[1] == expected[1]
        assert found[0].dtype == expected[0].dtype
        assert torch.equal(found[0].float(), expected[0].float())
    # Any other numbers are rounded to a neighbour.
    found, scale = fp8_quantize(drawn, gradient)
    step = 2 ** (drawn.abs() / scale).clamp(min=2**-14).log2().floor() * (0.25 if gradient else 0.125)
    inside = (drawn / scale).abs() < (57344 if gradient else 448) / 2
    bound = step.maximum(torch.tensor(2.0**-16 if gradient else 2.0**-9))
    carried = (drawn / scale).abs().frexp().mantissa > 0.875
    assert bool((((found.float() - drawn / scale).abs() <= bound) | carried | ~inside).all())


@pytest.mark.parametrize("largest", [448.0, 1.0, 0.0, 2.0**-40, 57344.0])
def test_a_power_of_two_is_not_rounded_up_to_the_next(largest: float) -> None:
    x = torch.tensor([[0.0, -largest, largest / 2]])
    for gradient in (False, True):
        (found, scale), (expected, expected_scale) = fp8_quantize(x, gradient), fp8_quantize_reference(x, gradient)
        assert scale == expected_scale
        assert torch.equal(found.float(), expected.float())
