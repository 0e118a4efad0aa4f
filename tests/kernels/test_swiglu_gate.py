import torch

from napkin.kernels.pointwise.activations import swiglu, swiglu_reference


def test_it_equals_the_reference_with_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(6, 5, 24, generator=generator, requires_grad=True)
    upstream = torch.randn(6, 5, 12, generator=generator)
    ours, reference = swiglu(gate_up), swiglu_reference(gate_up)
    assert torch.equal(ours, reference)
    gradients = (torch.autograd.grad(y, gate_up, upstream) for y in (ours, reference))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)
