"""The fused operators' kernels as compiled for compute capability 8.0, against the plain forms, with gradients."""

import pytest
import torch
from torch import Tensor

from oracles.fused_operators import CHECKS, Check, adamw
from oracles.ptx.launches import executing_ptx

BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


BY_ARGUMENTS = [each for each in CHECKS if each is not adamw]
"""The kernel of AdamW finds its tensors by a table."""


@pytest.mark.parametrize("check", BY_ARGUMENTS, ids=lambda check: check.__name__)
def test_compiled_kernels_equal_their_plain_form_in_bf16(check: Check) -> None:
    with executing_ptx() as executed:
        check(torch.bfloat16, BOUNDS[torch.bfloat16])
    assert executed


@pytest.mark.parametrize("check", BY_ARGUMENTS[2:13:3], ids=lambda check: check.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_compiled_kernels_equal_their_plain_form(check: Check, dtype: torch.dtype) -> None:
    with executing_ptx() as executed:
        check(dtype, BOUNDS[dtype])
    assert executed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_compiled_kernel_of_adamw_is_the_formula(dtype: torch.dtype) -> None:
    from napkin.kernels.pointwise.triton_adamw import adamw as fused_adamw

    def drawn(numel: int, seed: int) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(seed))

    numels = (1500, 0, 1, 17_000, 1504)
    parameters, gradients, averages = ([drawn(numel, seed) for numel in numels] for seed in range(3))
    squares = [drawn(numel, 3).square() for numel in numels]
    copies = [torch.zeros(numel, dtype=dtype) for numel in numels]
    wide = [[each.double() for each in tensors] for tensors in (parameters, gradients, averages, squares)]
    reachable = [*parameters, *gradients, *averages, *squares, *copies]
    with executing_ptx(reachable=reachable) as executed:
        factor = torch.tensor(0.37)
        fused_adamw(parameters, gradients, averages, squares, copies, factor, 0.01, 0.9, 0.95, 1e-8, 0.1, 3)
    for mine, copy, average, square, p, g, m, v in zip(parameters, copies, averages, squares, *wide, strict=True):
        m, v = 0.9 * m + 0.1 * 0.37 * g, 0.95 * v + 0.05 * (0.37 * g).square()
        corrected = (v / (1 - 0.95**3)).sqrt() + 1e-8
        p = p * (1 - 0.01 * 0.1) - 0.01 * m / (1 - 0.9**3) / corrected
        for found, expected in ((average, m), (square, v), (mine, p)):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(copy, mine.to(dtype))
    assert {each.kernel for each in executed} == {"adamw_kernel"}
