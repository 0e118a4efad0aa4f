import torch
from torch import Tensor

from napkin.kernels.norms.normalization import rms_norm, rms_norm_reference


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_it_equals_the_reference_with_gradients() -> None:
    x, gain = (3 + normal(5, 7, 48)).requires_grad_(), normal(48, seed=1).requires_grad_()
    upstream = normal(5, 7, 48, seed=2)
    ours, reference = rms_norm(x, gain, 1e-3), rms_norm_reference(x, gain, 1e-3)
    assert torch.equal(ours, reference)
    gradients = (torch.autograd.grad(y, (x, gain), upstream) for y in (ours, reference))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
