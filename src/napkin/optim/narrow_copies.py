"""Copies of weight matrices in the format of products: the update writes them, so that no product casts its weight.

Autocast casts an fp32 matrix once for each pass of a micro-batch: 4 bytes are read and 2 written per number. An update
that writes the copy beside the matrix writes 2, once per step.
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
        """All copies."""
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
        """The update has written both."""
        self._versions[matrix] = matrix._version


class _Narrowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = matrix.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_outputs[0].to(ctx.dtype), None
