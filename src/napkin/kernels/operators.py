"""Common parts of all operators: their registration with torch, the format in which they multiply under autocast, and
the mark of a gradient that is computed in the forward pass."""

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.machine_code.loading import MachineCode

COMPUTED = frozenset({torch.float32, torch.bfloat16})
"""The formats of which the compiled kernels read and write numbers."""

KERNELS = MachineCode(
    "napkin.kernels", "napkin: compiling kernels for this machine (once, a few seconds)", pattern="numba_*.py"
)
_LIBRARY = torch.library.Library("napkin", "FRAGMENT")
_marked = threading.local()


def load_for_training() -> None:
    """Load the kernels of a training step, all at once: what is missing is built side by side, with one message."""
    KERNELS.load("attention.numba_rows", "loss.numba_loss", "norms.numba_norms", "pointwise.numba_pointwise")


def load_for_decoding() -> None:
    """Load the kernels of generating token by token, likewise all at once."""
    KERNELS.load("attention.numba_decode", "products.numba_products")


def float_bits(x: float) -> int:
    """The bits of the nearest float32: arguments are integers, see `float_argument` in numba_numbers.py."""
    return struct.unpack("<i", struct.pack("<f", x))[0]


def cpu_operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate what computes an operator `torch.ops.napkin.NAME` with that schema in compiled loops; `fake` makes
    results without computing. It has no gradient of its own."""
    name = schema.partition("(")[0]

    def decorate(compute: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, compute, "CPU")
        torch.library.register_fake(f"napkin::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.napkin, name).default

    return decorate


def is_computed(*tensors: Tensor) -> bool:
    """True if compiled kernels take those tensors: on a CPU, contiguous, in a format that they read, and not while
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


def may_be_compiled() -> bool:
    """True if loops may take the place of torch's operators: in inference mode, for tensors that have data."""
    faked = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return torch.is_inference_mode_enabled() and not faked


def save_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    """Keep the one input of an operator for its backward pass."""
    ctx.save_for_backward(*inputs)


def as_rows(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "row n"]:
    """All vectors of the last dimension, one after the other in memory."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors as matrix products take them under autocast; without it, as they are."""
    dtype = _autocast_dtype(tensors[0].device.type)
    return tensors if dtype is None else tuple(tensor.to(dtype) for tensor in tensors)


def dtype_of_product(first: Tensor, second: Tensor) -> torch.dtype:
    """The dtype in which two tensors are multiplied: autocast's, or the one that holds both."""
    return _autocast_dtype(first.device.type) or torch.promote_types(first.dtype, second.dtype)


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def early_gradient() -> AbstractContextManager[None]:
    """While it lasts, what this thread computes belongs to the backward pass: a gradient that an operator computes in
    its forward pass is marked so. Compiled code is not marked."""
    return nullcontext() if torch.compiler.is_compiling() else _marking()


def computes_early_gradient() -> bool:
    """True if this thread is in an `early_gradient` context."""
    return getattr(_marked, "depth", 0) > 0


@contextmanager
def _marking() -> Iterator[None]:
    _marked.depth = getattr(_marked, "depth", 0) + 1
    try:
        yield
    finally:
        _marked.depth -= 1
