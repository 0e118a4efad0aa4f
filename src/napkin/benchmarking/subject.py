"""The subject of a measurement: a module with its inputs, and the passes of its training step as functions of both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from napkin.accounting.counting import count
from napkin.accounting.ledger import Ledger
from napkin.benchmarking.sampling import Timed
from napkin.benchmarking.work import Pass
from napkin.hardware.target import Target


@dataclass(frozen=True)
class Subject:
    """A module whose `forward(*inputs)` returns a tensor."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    step: Callable[[], object] | None = None
    """A whole training step, where it has an optimizer."""


class Draw:
    """Draws inputs, the same for the same seed; those that are not ids are leaves that want gradients."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type, self.dtype = device_type, dtype
        # Not torch's own: a benchmark leaves the global random state as it is.
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator) * std
        return drawn.to(self.device_type, self.dtype).requires_grad_()

    def weight(self, *shape: int) -> Tensor:
        """A matrix whose products with normal numbers are normal: the standard deviation is 1/sqrt(last dimension)."""
        return self.normal(*shape, std=shape[-1] ** -0.5)

    def ids(self, high: int, *shape: int) -> Tensor:
        """Whole numbers below `high`."""
        return torch.randint(high, shape, generator=self.generator).to(self.device_type)


class Operation(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def timed_pass(subject: Subject, which: Pass) -> Timed:
    """One pass as it is timed: before a backward pass alone, the forward pass is made and not timed."""
    if which == "step":
        assert subject.step is not None
        return Timed(subject.step)
    module, inputs = subject.module, subject.inputs
    if which == "forward":
        return Timed(lambda: module(*inputs))
    leaves = [each for each in (*module.parameters(), *inputs) if each.requires_grad]
    gradient = output_gradient(subject)
    outputs: list[Tensor] = []

    def prepare() -> None:
        for leaf in leaves:
            leaf.grad = None
        outputs[:] = [module(*inputs)]

    def backward() -> None:
        # The graph is freed with the last reference to its end, within the time, as in a step.
        outputs.pop().backward(gradient)

    def both() -> None:
        prepare()
        backward()

    return Timed(both) if which == "both" else Timed(backward, prepare)


def output_gradient(subject: Subject) -> Tensor:
    """The gradient that a backward pass begins with: ones, in memory of their own."""
    return torch.ones_like(subject.module(*subject.inputs)).contiguous().detach()


def count_passes(subject: Subject, target: Target) -> Ledger:
    """The ledger of a forward and a backward pass; fake tensors stay fake.

    Raises NapkinError for what depends on values, as `napkin.count` does.
    """

    def passes(module: nn.Module, batch: Any) -> None:
        *inputs, gradient = batch
        module(*inputs).backward(gradient)
        for leaf in (*module.parameters(), *inputs):
            leaf.grad = None

    return count(subject.module, (*subject.inputs, output_gradient(subject)), passes, target=target)
