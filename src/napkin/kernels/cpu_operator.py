"""Operators of napkin that a CPU computes with compiled loops, registered with torch, so that they can be traced."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_LIBRARY = torch.library.Library("napkin", "FRAGMENT")

COMPUTED = frozenset({torch.float32, torch.bfloat16})
"""The formats of which the compiled kernels read and write numbers."""


def cpu_operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate what computes an operator `torch.ops.napkin.NAME` with that schema; `fake` makes results without
    computing. It has no gradient of its own."""
    name = schema.partition("(")[0]

    def decorate(compute: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, compute, "CPU")
        torch.library.register_fake(f"napkin::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.napkin, name).default

    return decorate


def is_computed(*tensors: Tensor) -> bool:
    """Whether compiled kernels take those tensors: on a CPU, contiguous, in a format that they read, and not while
    torch.compile traces, which fuses the plain forms by itself."""
    if torch.compiler.is_compiling():
        return False
    return all(x.device.type == "cpu" and x.dtype in COMPUTED and x.is_contiguous() for x in tensors)


def differentiable(x: Tensor, compute: Callable[..., Tensor], differentiate: Callable[..., Tensor]) -> Tensor:
    """compute(x), whose gradient is differentiate(gradient, x): x alone is kept."""
    return _OfOneTensor.apply(x, compute, differentiate)  # pyright: ignore[reportReturnType]


class _OfOneTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Callable[..., Tensor], differentiate: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.differentiate = differentiate
        return compute(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.differentiate(grad_outputs[0].contiguous(), *ctx.saved_tensors), None, None
