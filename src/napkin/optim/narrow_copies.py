"""Copies of weight matrices in the format of products: the update writes them, so that no product casts its weight.

Autocast casts an fp32 matrix once for each pass of a micro-batch: 4 bytes are read and 2 written per number. An update
that writes the copy beside the matrix writes 2, once per step.

Stochastic rounding of fp32 to bf16: up or down at random, so that the mean is exact.

A bf16 weight has 8 significant bits: rounded to nearest, an update of less than 1/512 of it is lost every time. If the
probability of rounding up is the fraction of the way to the next number, the mean of the updates is exact (Gupta et al.
2015; for language models, Zamirai et al. 2020).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class NarrowCopies:
    """The copies, by matrix. One that was changed by anything but `update` is cast again before it is used."""

    def __init__(self, matrices: Iterable[Tensor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._copies = {matrix: matrix.detach().to(dtype) for matrix in matrices}
        self._versions = {matrix: matrix._version for matrix in self._copies}

    def __contains__(self, matrix: Tensor) -> bool:
        return matrix in self._copies

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._copies.values())

    def of(self, matrix: Tensor) -> Tensor | None:
        """A matrix as products under autocast take it; None without autocast, or if there is no copy."""
        copy, device_type = self._copies.get(matrix), matrix.device.type
        if copy is None or not torch.is_autocast_enabled(device_type):
            return None
        if torch.get_autocast_dtype(device_type) != self.dtype:
            return None
        if self._versions[matrix] != matrix._version:
            with torch.no_grad():
                copy.copy_(matrix)
            self._versions[matrix] = matrix._version
        return copy

    def narrowed(self, matrix: Tensor) -> Tensor:
        """The copy, whose gradient is the matrix's; the matrix itself where there is none."""
        copy = self.of(matrix)
        return matrix if copy is None else _Narrowed.apply(matrix, copy)  # pyright: ignore[reportReturnType]

    def to_overwrite(self, matrix: Tensor) -> Tensor:
        """The copy for an update that is about to write both."""
        return self._copies[matrix]

    def overwritten(self, matrix: Tensor) -> None:
        """Note that the update has written both."""
        self._versions[matrix] = matrix._version


class _Narrowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = matrix.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_outputs[0].to(ctx.dtype), None


class StochasticRounding:
    """Rounds the updates of a step; its random numbers depend only on seed and step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._key = 0

    def begin(self, step: int) -> None:
        """Seed the random numbers of this step."""
        self._key = (self.seed * 1_000_003 + step) % 2**63
        self._generators.clear()

    @torch.no_grad()
    def __call__(self, targets: list[Tensor], values: list[Tensor]) -> None:
        """Round fp32 `values` into bf16 `targets` of the same shapes; `values` are overwritten."""
        for target, value in zip(targets, values, strict=True):
            if target.dtype != torch.bfloat16:
                target.copy_(value)
                continue
            # bf16 is the upper half of fp32. A random lower half is added to the bits; a carry rounds up.
            bits = value.view(torch.int32)
            noise = self._noise(value)
            bits.add_(noise).add_(2**15).bitwise_and_(-(2**16))
            target.copy_(value)

    def _noise(self, like: Tensor) -> Tensor:
        """Random integers from -2^15 to 2^15 - 1, four of them from each 64-bit draw."""
        if like.device not in self._generators:
            self._generators[like.device] = torch.Generator(like.device).manual_seed(self._key)
        draws = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
        draws.random_(-(2**63), None, generator=self._generators[like.device])
        return draws.view(torch.int16)[: like.numel()].view(like.shape)
