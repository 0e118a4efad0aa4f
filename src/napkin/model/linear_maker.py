"""How a model's linear layers are made: with which std, generator and multiplier, decided once for all of them."""

from collections.abc import Callable

import torch
from torch import nn

from napkin.model.initialization import fan_in_std, truncated_normal
from napkin.model.linear import Linear, MultipliedLinear


class LinearMaker:
    """Makes linear layers that start by one rule.

    `std` is a function of a matrix's inputs and outputs. `residual_scale` multiplies the starting std of those that
    write into the residual stream.
    """

    def __init__(
        self,
        *,
        std: Callable[[int, int], float] = fan_in_std,
        residual_scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        self.std = std
        self.residual_scale = residual_scale
        self.generator = generator

    def linear(self, inputs: int, *outputs: int, bias: bool = False) -> Linear:
        """Matrices that read the same input, stacked: one product to launch, under autocast one cast of the input."""
        return self._make(inputs, sum(outputs), bias=bias, std=self.std(inputs, outputs[0]))

    def writer(self, inputs: int, outputs: int, *, bias: bool = False) -> Linear:
        """A matrix that writes into the residual stream."""
        return self._make(inputs, outputs, bias=bias, std=self.residual_scale * self.std(inputs, outputs))

    def stack(self, n: int, inputs: int, outputs: int, *, writes: bool = False, parts: int = 1) -> nn.Parameter:
        """n matrices in one parameter [n, parts · outputs, inputs], for experts."""
        std = self.std(inputs, outputs) * (self.residual_scale if writes else 1.0)
        return truncated_normal(n, parts * outputs, inputs, std=std, generator=self.generator)

    def _make(self, inputs: int, outputs: int, *, bias: bool, std: float) -> Linear:
        return Linear(inputs, outputs, bias=bias, std=std, generator=self.generator)


class MultipliedLinearMaker(LinearMaker):
    """Makes linear layers with µP's multiplier, base width over width."""

    def __init__(self, multiplier: float, **settings: object) -> None:
        super().__init__(**settings)  # pyright: ignore[reportArgumentType]
        self.multiplier = multiplier

    def _make(self, inputs: int, outputs: int, *, bias: bool, std: float) -> Linear:
        return MultipliedLinear(
            inputs, outputs, multiplier=self.multiplier, bias=bias, std=std, generator=self.generator
        )
