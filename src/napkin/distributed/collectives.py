"""Collectives on activations, with gradients: torch's functional ones, whose result is waited for at once.

What a rank computes from a gathered tensor gives it a summand of the gradient: the backward pass of a gather adds up
the summands and scatters the sum, that of a scatter gathers.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed._functional_collectives import wait_tensor

from napkin.kernels.autocast import in_autocast_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# The operators, and not the functions around them: these return a tensor that waits at its first use, of a class of its
# own, from which no gradient comes where it is a view (for a batch of 1).
_operators = torch.ops._c10d_functional


def all_gather(part: Tensor, dim: int, group: "ProcessGroup") -> Tensor:
    """The ranks' parts, of one shape, joined along a dimension. The backward pass reduce-scatters the gradient."""
    size = group.size()
    joined = wait_tensor(_operators.all_gather_into_tensor(part.contiguous(), size, group.group_name))
    return torch.cat(joined.chunk(size), dim=dim) if dim else joined


def reduce_scatter(summand: Tensor, dim: int, group: "ProcessGroup") -> Tensor:
    """This rank's part, along a dimension that divides evenly, of the sum of the ranks' tensors. The backward pass
    all-gathers the gradient."""
    size = group.size()
    parts = torch.cat(summand.chunk(size, dim=dim)) if dim else summand.contiguous()
    return wait_tensor(_operators.reduce_scatter_tensor(parts, "sum", size, group.group_name))


def all_reduce(summand: Tensor, group: "ProcessGroup", how: str = "sum") -> Tensor:
    """The sum (or "max") of the ranks' tensors. The backward pass of a sum adds up the ranks' gradients."""
    return wait_tensor(_operators.all_reduce(summand.contiguous(), how, group.group_name))


def all_to_all(rows: Tensor, sent: list[int], received: list[int], group: "ProcessGroup") -> Tensor:
    """The rows that the ranks send to this one, in their order: `sent` and `received` are how many, by rank. The
    backward pass sends the gradients back."""
    return wait_tensor(_operators.all_to_all_single(rows.contiguous(), received, sent, group.group_name))


def all_reduce_together(summands: list[Tensor], group: "ProcessGroup") -> list[Tensor]:
    """The sums of the ranks' tensors, which are sent at once. Without gradients."""
    return [wait_tensor(each) for each in _operators.all_reduce_coalesced(summands, "sum", group.group_name)]


def in_products_dtype(x: Tensor) -> Tensor:
    """x as autocast's matrix products take it: what is cast before it is sent has fewer bytes."""
    return in_autocast_dtype(x)[0]
