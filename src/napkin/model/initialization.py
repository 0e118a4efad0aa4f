"""Initial values of parameters: a pure function of a generator's state, the same numbers on every device."""

import math
from collections.abc import Callable

import torch
from torch import nn

_CUT = 3.0


def truncated_normal(*shape: int, std: float, generator: torch.Generator | None = None) -> nn.Parameter:
    """A new parameter, each number drawn from a normal distribution cut off at ±3 std.

    It is on the current default device and in the current default dtype. The numbers are drawn on the CPU in
    fp32 with `generator` (a CPU generator; None is torch's global one), so they do not depend on the device. On
    the meta device and under FakeTensorMode nothing is drawn.
    """
    parameter = nn.Parameter(torch.empty(shape))
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


def fan_in_std(inputs: int, outputs: int) -> float:
    """1/sqrt(inputs): keeps the variance in the forward pass (LeCun et al. 1998)."""
    return inputs**-0.5


def glorot_std(inputs: int, outputs: int) -> float:
    """sqrt(2/(inputs + outputs)): a compromise between forward and backward pass (Glorot & Bengio 2010)."""
    return (2 / (inputs + outputs)) ** 0.5


INITIAL_STDS: dict[str, Callable[[int, int], float]] = {"fan_in": fan_in_std, "glorot": glorot_std}
