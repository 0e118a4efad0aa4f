"""Optimizer state in the host's memory: it visits the GPU bucket by bucket (Ren et al. 2021, "ZeRO-Offload", updates
on the CPU itself; here the GPU does the arithmetic and the link carries the state both ways).

Made by an operator of its own, so that whoever counts a step's memory sees that it takes none of the device's.
"""

import torch
from torch import Tensor


@torch.library.custom_op("napkin::host_copy", mutates_args=())
def host_copy(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, page-locked where it is a GPU's."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)


@host_copy.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def fetch(states: list[list[Tensor]], device: torch.device) -> list[list[Tensor]]:
    """Copies of a bucket's state on the device."""
    # Pages are locked: the copies are queued, and the update behind them.
    return [
        [torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True) for tensor in state]
        for state in states
    ]


def put_back(states: list[list[Tensor]], fetched: list[list[Tensor]]) -> None:
    """Write a bucket's state back to where it lives."""
    for state, new in zip(states, fetched, strict=True):
        for tensor, value in zip(state, new, strict=True):
            tensor.copy_(value, non_blocking=True)
