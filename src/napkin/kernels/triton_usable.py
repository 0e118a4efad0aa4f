"""Tells whether Triton kernels can compute on a tensor: on CUDA and ROCm devices, or anywhere in Triton's
interpreter."""

import functools
import os
from importlib.util import find_spec

import torch
from torch import Tensor

from napkin.errors import NapkinError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LEAST_CAPABILITY = (8, 0)
"""The least compute capability of an NVIDIA GPU: bf16 and asynchronous copies into shared memory begin with Ampere."""


@functools.cache
def triton_is_installed() -> bool:
    """True if `import triton` would find something."""
    return find_spec("triton") is not None


def is_interpreted() -> bool:
    """True if kernels run in Triton's interpreter, on tensors in the host's memory: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(tensor: Tensor) -> bool:
    """True if the Triton form of an operator computes on this tensor's device and dtype.

    Raises NapkinError for bf16 in the interpreter, whose products of bf16 matrices are wrong without a word.
    """
    if tensor.dtype not in DTYPES or not triton_is_installed():
        return False
    if is_interpreted():
        if tensor.dtype == torch.bfloat16:
            raise NapkinError(
                "TRITON_INTERPRET is 1 and a tensor is bf16: Triton's interpreter multiplies bf16 matrices wrongly, "
                "use float32 or float16 there, or a GPU"
            )
        return True
    return tensor.is_cuda and _is_new_enough(tensor.device)


def triton_obstacle(device_type: str) -> str | None:
    """Why no Triton kernel can run on the tensors of this process's device; None if they can."""
    if not triton_is_installed():
        return "triton is not installed: pip install triton"
    if is_interpreted():
        return None
    if device_type != "cuda":
        return "its kernels are for a GPU, and the run is on a CPU"
    if not _is_new_enough(torch.device("cuda", torch.cuda.current_device())):
        return f"the GPU's compute capability is below {'.'.join(map(str, LEAST_CAPABILITY))}"
    return None


def needs_triton(name: str, tensor: Tensor) -> None:
    """Raise NapkinError where `name`, chosen for its Triton form, would run without it on a GPU."""
    if tensor.is_cuda and tensor.dtype in DTYPES and not triton_is_installed():
        raise NapkinError(f"{name} is a Triton kernel and triton is not installed: pip install triton")


@functools.cache
def _is_new_enough(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
