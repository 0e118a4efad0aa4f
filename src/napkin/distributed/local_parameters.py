"""Parameters that ranks divide: DTensors in `named_parameters`, local tensors where a module computes.

Optimizer state, clipping and checkpoints follow from a parameter's placement. The modules see none of it: their
attributes are this rank's parts, and the gradients of these are DTensors again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from napkin.distributed.collectives import all_reduce_together
from napkin.optim.sharded_tensors import sharded_like


@dataclass(frozen=True)
class Divided:
    """How the ranks of a mesh dimension divide a parameter: along `dim`, which `heights` divide into stacked matrices.

    Each matrix is divided by itself, and a rank's part is its parts of all of them: along `dim` the DTensor is a
    permutation of the whole parameter.
    """

    dim: int
    heights: tuple[int, ...] = ()

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """A rank's part. As with torch.chunk, the last ranks have less where the rest does not divide evenly."""
        matrices = whole.split(self.heights or whole.shape[self.dim], dim=self.dim)
        parts = [_chunk(matrix, rank, size, self.dim) for matrix in matrices]
        return torch.cat(parts, dim=self.dim) if len(parts) > 1 else parts[0].clone()


def _chunk(whole: Tensor, rank: int, size: int, dim: int) -> Tensor:
    each = -(-whole.shape[dim] // size)
    start = min(rank * each, whole.shape[dim])
    return whole.narrow(dim, start, min(each, whole.shape[dim] - start))


def make_local(module: nn.Module, mesh: DeviceMesh, divided: dict[str, Divided]) -> None:
    """Replace a module's own parameters by DTensors on a mesh of one dimension, and let it compute with their parts.

    `divided` says how, by name. Every rank has all of the others; it computes with some of the tokens or heads, so
    that its gradient of them is a summand, see `add_up_summands`.
    """
    gradients: dict[str, Sequence[Placement]] = {}
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        how = divided.get(name)
        here = parameter.detach() if how is None else how.part(parameter.detach(), mesh.get_local_rank(), mesh.size())
        placements = (Replicate() if how is None else Shard(how.dim),)
        made = DTensor.from_local(
            here.contiguous(), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        module._parameters[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)
        gradients[name] = (Partial(),) if how is None else placements
    if gradients:
        module.__class__ = _computing_locally(type(module), tuple(gradients))
        cast(Any, module)._gradient_placements = gradients


def _computing_locally(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass whose parameters, as attributes, are this rank's parts."""
    return type(kind.__name__, (kind,), {name: property(_local_part(name)) for name in names})


def _local_part(name: str) -> Any:
    def part(module: Any) -> Tensor:
        parameter, placements = module._parameters[name], module._gradient_placements[name]
        # FSDP2 exchanges the entries of `_parameters`: a gathered one while the module computes, otherwise a shard, on
        # a mesh that has its ranks too, which it looks up here.
        is_gathered = len(parameter.placements) == len(placements)
        return parameter.to_local(grad_placements=placements) if is_gathered else parameter

    return part


@torch.no_grad()
def add_up_summands(parameters: Sequence[Tensor]) -> None:
    """All-reduce the gradients of which each rank has a summand, all at once; a collective."""
    summands = [p for p in parameters if p.grad is not None and _is_summand(p.grad)]
    if not summands:
        return
    mesh = cast(DTensor, summands[0]).device_mesh
    sums = all_reduce_together([cast(DTensor, p.grad).to_local() for p in summands], mesh.get_group())
    for parameter, total in zip(summands, sums, strict=True):
        parameter.grad = sharded_like(parameter, total)


def _is_summand(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)
