"""Mark a gradient that an operator computes in its forward pass, for those who ask which pass a call belongs to."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_marked = threading.local()


def early_gradient() -> AbstractContextManager[None]:
    """While it lasts, what this thread computes belongs to the backward pass. Compiled code is not marked."""
    return nullcontext() if torch.compiler.is_compiling() else _marking()


def computes_early_gradient() -> bool:
    """Whether this thread is in an `early_gradient` context."""
    return getattr(_marked, "depth", 0) > 0


@contextmanager
def _marking() -> Iterator[None]:
    _marked.depth = getattr(_marked, "depth", 0) + 1
    try:
        yield
    finally:
        _marked.depth -= 1
