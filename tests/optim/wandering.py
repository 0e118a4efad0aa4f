"""Parameters, and gradients that wander: what the optimizers are compared on."""

from collections.abc import Iterable

import torch
from torch import Tensor

SHAPES = [(5, 7), (7,), (3, 2, 2), ()]
LEARNING_RATE = 0.01


def fresh_parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same ones each time."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in SHAPES]


def gradient_of(parameter: Tensor, place: int, generator: torch.Generator) -> Tensor:
    """Noise around the parameter itself, of another size for each place among the parameters: six orders in all."""
    noise = torch.randn(parameter.shape, generator=generator)
    return ((noise.to(parameter.dtype) + parameter.detach()) * 10.0 ** (2 * place - 5)).to(parameter.dtype)


def learning_rate(step: int) -> float:
    """One that changes."""
    return LEARNING_RATE / (1 + step % 7)


def train(parameters: list[Tensor], optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Steps of the optimizer on such gradients."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for place, parameter in enumerate(parameters):
            parameter.grad = gradient_of(parameter, place, generator)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
