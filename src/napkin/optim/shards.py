"""Sharded tensors (torch's DTensor), as FSDP2 makes of parameters and gradients: a rank has some of the rows.

What is elementwise runs on the rows alone. Nothing of torch.distributed is imported here.
"""

from typing import Any, cast

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """The rows of a sharded tensor that this process has, by reference; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def is_sharded(tensor: Tensor) -> bool:
    """Whether other processes have rows of it too."""
    return hasattr(tensor, "device_mesh")


def rows_of(tensor: Tensor) -> tuple[int, int]:
    """The first row of a tensor that this process has, and the one after the last."""
    rows = tensor.shape[0]
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return 0, rows
    # torch.chunk's division, which FSDP2 uses.
    each = -(-rows // mesh.size())
    start = min(mesh.get_local_rank() * each, rows)
    stop = min(start + each, rows)
    assert len(local(tensor)) == stop - start
    return start, stop


def like(tensor: Tensor, rows: Tensor) -> Tensor:
    """`rows` of this process's, spread as those of `tensor` are; of a tensor that is not sharded, `rows` as they are.

    They may lie on another device than the tensor's own, for which `DTensor.from_local` would move them.
    """
    if not is_sharded(tensor):
        return rows
    sharded = cast(Any, tensor)
    return type(sharded)(rows, sharded._spec, requires_grad=False)


def gathered(tensor: Tensor, rows: Tensor | None = None) -> Tensor:
    """A sharded tensor whole, or everybody's `rows` in place of its own; all processes call it in one order."""
    sharded = cast(Any, tensor)
    spread = type(sharded).from_local(
        local(tensor) if rows is None else rows,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
    return spread.full_tensor()
