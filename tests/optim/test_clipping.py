import math

import pytest
import torch
from torch import Tensor

from napkin.optim.clipping import clip_gradients


def with_gradients(*gradients: Tensor) -> list[Tensor]:
    parameters = [torch.zeros_like(gradient, requires_grad=True) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


@pytest.mark.parametrize("max_norm", [0.1, 3.0, 1000.0])
def test_norm_and_clipped_gradients_equal_torch(max_norm: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in ((20, 30), (7,), (2, 3, 4))]
    ours, theirs = with_gradients(*gradients), with_gradients(*gradients)
    norm = clip_gradients(ours, max_norm)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm), rtol=1e-6, atol=0)
    torch.testing.assert_close([p.grad for p in ours], [p.grad for p in theirs], rtol=1e-5, atol=1e-7)


def test_clipping_keeps_the_direction_and_reaches_the_limit() -> None:
    (parameter,) = with_gradients(torch.tensor([3.0, 4.0]))
    assert clip_gradients([parameter], 1.0).item() == 5
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))


def test_gradients_within_bounds_keep_every_bit() -> None:
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(0))
    (parameter,) = with_gradients(gradient)
    clip_gradients([parameter], 100.0)
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, gradient)


def test_the_norm_of_many_bf16_gradients_is_summed_in_fp32() -> None:
    parameters = with_gradients(torch.ones(10_000, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16))
    norm = clip_gradients(parameters, 1e9)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(math.sqrt(10_001), rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad: float) -> None:
    parameters = with_gradients(torch.ones(3), torch.tensor([1.0, bad]))
    assert not clip_gradients(parameters, 1.0).isfinite()


def test_parameters_without_gradients_are_skipped() -> None:
    bare = torch.zeros(3, requires_grad=True)
    assert clip_gradients([bare], 1.0).item() == 0
    assert clip_gradients([bare, *with_gradients(torch.tensor([2.0]))], 1.0).item() == 2


def test_a_generator_of_parameters_is_read_once_and_clipped_whole() -> None:
    parameters = with_gradients(torch.tensor([3.0]), torch.tensor([4.0]))
    clip_gradients((p for p in parameters), 1.0)
    torch.testing.assert_close([p.grad for p in parameters], [torch.tensor([0.6]), torch.tensor([0.8])])
