"""The dtype in which operators multiply under autocast."""

import torch
from torch import Tensor


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of matrix products under autocast on that type of device; None without autocast."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors as matrix products take them under autocast; without it, as they are."""
    dtype = autocast_dtype(tensors[0].device.type)
    return tensors if dtype is None else tuple(tensor.to(dtype) for tensor in tensors)


def dtype_of_product(first: Tensor, second: Tensor) -> torch.dtype:
    """The dtype in which two tensors are multiplied: autocast's, or the one that holds both."""
    return autocast_dtype(first.device.type) or torch.promote_types(first.dtype, second.dtype)
