"""What a program of torch.compile reports while it runs: origins of operators, buffers that it allocates, kernels."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from napkin.accounting.ledger import Phase


@dataclass(frozen=True, slots=True)
class Origin:
    """The part of a model that an operator of a program comes from."""

    module: str
    """Path of the module, from the one that was compiled on."""
    phase: Phase | None
    """The phase is None in a program without a backward pass, which cannot tell."""
    node: tuple[int, int]
    """The graph, and the number of the operator in it; gradients have that of the operator that they belong to."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A generated kernel: fused operators, or a template such as FlexAttention's."""

    name: str
    origin: Origin
    bytes_read: int
    bytes_written: int
    elementwise_flops: int
    flops: int = 0
    """FLOPs of the contractions that it computes, over all query-key pairs; recomputation left out."""
    recomputed_flops: int = 0
    contraction: tuple[int, int, int, int] | None = None
    opaque: bool = False
    """True for a kernel that the user wrote, whose FLOPs are not declared."""


class Listener(Protocol):
    """Receives what a program reports while it runs."""

    def allocate(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a buffer of the program."""
        ...

    def reinterpret(self, tensor: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        """Make a view of a buffer; a view is not recorded as an operator."""
        ...

    def run_kernel(self, kernel: Kernel, tensors: list[Tensor]) -> None:
        """Note that a kernel runs on `tensors`, those that it reads and those that it writes."""
        ...

    def come_from(self, origin: Origin | None) -> None:
        """Note where the operators come from that run next; None after a program."""
        ...


_listeners: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Programs that run in this context report to `listener`."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def listener() -> Listener:
    """The listener of the program that runs."""
    return _listeners[-1]
