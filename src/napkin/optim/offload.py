"""Optimizer state in the host's memory, copied to the GPU and back bucket by bucket.

After "ZeRO-Offload" (Ren et al. 2021), which updates on the CPU; here the GPU computes, and the link carries the state
both ways.
"""

import torch
from torch import Tensor


# An operator of its own, so that the accountant sees that the copy takes none of the device's memory.
@torch.library.custom_op("napkin::host_copy", mutates_args=())
def host_copy(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, page-locked if the tensor is on a GPU."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)


@host_copy.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def copy_to_device(states: list[list[Tensor]], device: torch.device) -> list[list[Tensor]]:
    """Copies of a bucket's state on the device."""
    # Pages are locked: the copies are queued, and the update behind them.
    return [
        [torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True) for tensor in state]
        for state in states
    ]


def copy_to_host(states: list[list[Tensor]], on_device: list[list[Tensor]]) -> None:
    """Copy a bucket's state from the device back into `states`."""
    for state, new in zip(states, on_device, strict=True):
        for tensor, value in zip(state, new, strict=True):
            tensor.copy_(value, non_blocking=True)
