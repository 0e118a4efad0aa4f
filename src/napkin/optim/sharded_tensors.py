"""Sharded tensors (torch's DTensor), as FSDP2 makes of parameters and gradients: each rank has some of the rows.

Elementwise updates run on the local rows. This module imports nothing of torch.distributed.
"""

from typing import Any, cast

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """The rows of a sharded tensor that this rank has, by reference; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def is_sharded(tensor: Tensor) -> bool:
    """True if other ranks have rows of it too."""
    return hasattr(tensor, "device_mesh")


def rows_of(tensor: Tensor) -> tuple[int, int]:
    """The first row of a tensor that this rank has, and the one after its last."""
    rows = tensor.shape[0]
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return 0, rows
    # Divided as torch.chunk does it, which FSDP2 uses.
    each = -(-rows // mesh.size())
    start = min(mesh.get_local_rank() * each, rows)
    stop = min(start + each, rows)
    assert len(local(tensor)) == stop - start
    return start, stop


def sharded_like(tensor: Tensor, rows: Tensor) -> Tensor:
    """This rank's `rows` as a tensor sharded like `tensor`; if that is not sharded, `rows` unchanged.

    They may be on another device than `tensor`, to which `DTensor.from_local` would move them.
    """
    if not is_sharded(tensor):
        return rows
    sharded = cast(Any, tensor)
    return type(sharded)(rows, sharded._spec, requires_grad=False)


def full_tensor(tensor: Tensor, rows: Tensor | None = None) -> Tensor:
    """A sharded tensor gathered from all ranks, or one made of each rank's `rows` in its place.

    A collective: all ranks have to call it in the same order.
    """
    sharded = cast(Any, tensor)
    gathered = type(sharded).from_local(
        local(tensor) if rows is None else rows,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
    return gathered.full_tensor()
