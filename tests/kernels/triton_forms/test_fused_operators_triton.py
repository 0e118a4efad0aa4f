"""The Triton kernels of the fused operators in the interpreter, against the plain forms, with gradients."""

import pytest
import torch

from oracles.fused_operators import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 4e-3)])
def test_a_kernel_equals_its_plain_form_with_gradients(check: Check, dtype: torch.dtype, bound: float) -> None:
    check(dtype, bound)
