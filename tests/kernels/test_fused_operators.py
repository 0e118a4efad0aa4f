"""The fused operators against the plain forms, with gradients; Triton's kernels of them: triton_forms/."""

import pytest
import torch
from torch import Tensor, nn

from napkin import count
from napkin.kernels.loss.cross_entropy import fused_linear_cross_entropy
from napkin.kernels.norms.normalization import fused_layer_norm, fused_rms_norm
from napkin.kernels.pointwise.activations import fused_gelu_tanh, fused_swiglu
from napkin.kernels.pointwise.rotary import fused_rotate
from oracles.fused_operators import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_a_fused_operator_equals_its_plain_form_with_gradients(check: Check, dtype: torch.dtype, bound: float) -> None:
    check(dtype, bound)


class Everything(nn.Module):
    """All fused operators, in no useful order."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(64)), nn.Parameter(torch.zeros(64))
        self.head = nn.Parameter(torch.randn(500, 32))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        normed, summed = fused_rms_norm(x, self.gain, 1e-5, residual=2 * x)
        normed, _ = fused_layer_norm(normed, self.gain, self.bias, 1e-5, residual=summed)
        tables = torch.ones(1, x.shape[1], 16), torch.ones(1, x.shape[1], 16)
        rotated = fused_rotate(normed.unflatten(-1, (4, 16)), *tables).flatten(-2)
        hidden = fused_swiglu(fused_gelu_tanh(rotated)).flatten(0, 1)
        return fused_linear_cross_entropy(hidden, self.head, targets.flatten())


@pytest.mark.thorough
def test_fused_operators_are_counted_by_their_fake_forms() -> None:
    batch = torch.randn(4, 128, 64), torch.zeros(4, 128, dtype=torch.int64)
    ledgers = [count(Everything(), batch, by="tracing"), count(Everything(), batch, by="running")]
    for ledger in ledgers:
        assert not ledger.unknown_operators
        # Logits, and the gradients of hidden states and weight.
        assert ledger.flops == 3 * 2 * 512 * 500 * 32
        assert ledger.elementwise_flops > 0
    assert ledgers[0].flops_by("phase") == ledgers[1].flops_by("phase")
