"""Sharded tensors (torch's DTensor), as FSDP2 makes of parameters and gradients: a rank has some of the rows.

What is elementwise runs on the rows alone. Nothing of torch.distributed is imported here.
"""

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """The rows of a sharded tensor that this process has, by reference; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]
