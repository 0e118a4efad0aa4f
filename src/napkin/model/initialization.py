"""Initial values of parameters: a pure function of a generator's state, the same numbers on every device."""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)

Device = torch.device | str | None
"""Place of a layer's parameters; None is torch's current default device."""

_CUT = 3.0


def truncated_normal(
    *shape: int,
    std: float,
    generator: torch.Generator | None = None,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """A new parameter, each number drawn from a normal distribution cut off at ±3 std.

    Without `device` and `dtype` it is on the current default device and in the current default dtype. The numbers are
    drawn on the CPU in fp32 with `generator` (a CPU generator; None is torch's global one), so they do not depend on
    the device. On the meta device and under FakeTensorMode nothing is drawn.
    """
    parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
    if parameter.is_meta:
        return parameter
    # By the inverse of the distribution function: rejection sampling would take a number of draws that depends on the
    # data, which fake tensors do not have.
    limit = math.erf(_CUT / math.sqrt(2))
    draws = torch.empty(shape, dtype=torch.float32, device="cpu")
    draws.uniform_(-limit, limit, generator=generator).erfinv_().mul_(std * math.sqrt(2))
    with torch.no_grad():
        parameter.copy_(draws)
    return parameter


@contextmanager
def default_device_and_dtype(device: Device, dtype: torch.dtype | None) -> Iterator[None]:
    """Make what is made inside on that device and in that dtype; None leaves torch's defaults."""
    before = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        if device is not None:
            stack.enter_context(torch.device(device))
        if dtype is not None:
            stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(dtype)
        yield


def moved(module: Module, device: Device, dtype: torch.dtype | None) -> Module:
    """The module on that device and in that dtype; itself if neither is given."""
    return module if device is None and dtype is None else module.to(device=device, dtype=dtype)


def fan_in_std(inputs: int, outputs: int) -> float:
    """1/sqrt(inputs): keeps the variance in the forward pass (LeCun et al. 1998)."""
    return inputs**-0.5


def glorot_std(inputs: int, outputs: int) -> float:
    """sqrt(2/(inputs + outputs)): a compromise between forward and backward pass (Glorot & Bengio 2010)."""
    return (2 / (inputs + outputs)) ** 0.5


INITIAL_STDS: dict[str, Callable[[int, int], float]] = {"fan_in": fan_in_std, "glorot": glorot_std}
