"""Dividing a model among the ranks of a layout, one dimension of the mesh after the other.

Optimizer state is divided among ranks that have the same parameters as in ZeRO, stage 1 (Rajbhandari et al. 2020).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from napkin.distributed.parallel_model import (
    CopiesModel,
    DDPModel,
    FSDPModel,
    ParallelModel,
    parameters_apart,
    shard_module,
)
from napkin.distributed.ranks import Ranks, combined, experts_are_sharded, flattened, make_expert_mesh, make_mesh
from napkin.model.transformer import Transformer
from napkin.optim.base import Optimizer
from napkin.optim.saved_state import local
from napkin.recipe.resolved import ResolvedRecipe

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from napkin.distributed.expert_parallel import DividedExperts
    from napkin.distributed.pipeline_stages import StageModule


def parallelize(model: Transformer, resolved: ResolvedRecipe, ranks: Ranks) -> ParallelModel:
    """Put a model on this rank's device and divide it as the layout says; a collective."""
    layout, device_type = resolved.layout, resolved.precision.device_type
    mesh = None if layout.world_size == 1 else make_mesh(layout, device_type)
    stages: list[StageModule] = []
    stacked: Mapping[str, tuple[int, ...]] = {}
    if layout.pipeline > 1:
        from napkin.distributed.pipeline_stages import cut_stages

        stages = cut_stages(model, layout, layout.coordinates(ranks.info.rank)["pipeline"])
    if mesh is not None and layout.context > 1:
        from napkin.distributed.context_parallel import split_sequences

        split_sequences(model, mesh["context"])
    if mesh is not None and layout.tensor > 1:
        from napkin.distributed.tensor_parallel import split_tensors

        stacked = split_tensors(model, mesh["tensor"])
    experts = None
    if layout.expert > 1:
        from napkin.distributed.expert_parallel import divide_experts

        expert_mesh, sharded = make_expert_mesh(layout, device_type), experts_are_sharded(layout)
        experts = divide_experts(model, expert_mesh, token_parts=layout.token_parts, sharded=sharded)
    if device_type != "cpu" and layout.strategy != "fsdp":
        model = model.to(device_type)
    parallel_model = _averaging(model, stages, resolved, ranks, mesh, experts)
    parallel_model.stacked, parallel_model.experts, parallel_model.stages = stacked, experts, stages
    return parallel_model


def _averaging(
    model: Transformer,
    stages: "list[StageModule]",
    resolved: ResolvedRecipe,
    ranks: Ranks,
    mesh: "DeviceMesh | None",
    experts: "DividedExperts | None",
) -> ParallelModel:
    """The model whose gradients are averaged over the ranks that compute other tokens."""
    layout = resolved.layout
    if mesh is None:
        return ParallelModel(model, ranks, layout)
    if stages:
        return _pipeline(model, stages, resolved, ranks, mesh, experts)
    if layout.strategy == "fsdp":
        return FSDPModel(model, ranks, resolved, _shards(resolved, mesh), experts)
    if layout.strategy == "ddp":
        copies = _copies(resolved, mesh)
        if layout.tensor > 1:
            return CopiesModel(model, ranks, resolved, copies)
        return DDPModel(model, ranks, layout, copies.get_group(), parameters_apart(experts))
    return ParallelModel(model, ranks, layout)


def _pipeline(
    model: Transformer,
    stages: "list[StageModule]",
    resolved: ResolvedRecipe,
    ranks: Ranks,
    mesh: "DeviceMesh",
    experts: "DividedExperts | None",
) -> ParallelModel:
    from napkin.distributed.pipeline import PipelineModel

    layout, averaged_over = resolved.layout, None
    if layout.strategy == "fsdp":
        shards = _shards(resolved, mesh)
        for stage in stages:
            # Parameters are gathered once per step, not for each of its many micro-batches.
            shard_module(stage, stage.blocks, resolved, shards, reshard_after_forward=False, experts=experts)
    elif layout.strategy == "ddp":
        averaged_over = _copies(resolved, mesh).get_group()
    pipeline = PipelineModel(model, ranks, layout, stages, mesh, averaged_over, parameters_apart(experts))
    pipeline.same_parameters = averaged_over
    return pipeline


def _shards(resolved: ResolvedRecipe, mesh: "DeviceMesh") -> "DeviceMesh":
    """The ranks among which FSDP2 divides parameters; with two dimensions, the first is that of their replicas."""
    layout = resolved.layout
    shards = flattened(mesh, "shard", "context") if layout.context > 1 else mesh["shard"]
    return combined(mesh["data"], shards) if layout.data > 1 else shards


def _copies(resolved: ResolvedRecipe, mesh: "DeviceMesh") -> "DeviceMesh":
    """The ranks that hold the same parameters but compute other tokens."""
    return flattened(mesh, "data", "shard", "context") if resolved.layout.context > 1 else mesh["data"]


# Each rank updates some of the parameters, keeps the optimizer state of these alone, and sends them to the others.
# Parameters are not cut, so that rules that need whole matrices, such as Muon's, work.


def shard_optimizer(optimizer: Optimizer, group: dist.ProcessGroup) -> None:
    """Let this rank of a group update only its part and keep only that part's state; each step then ends with a
    broadcast of each parameter. All ranks of the group must have the same parameters, in the same order, with the same
    gradients.
    """
    parameters: list[Tensor] = [p for each in optimizer.param_groups for p in each["params"]]
    ranks = dist.get_process_group_ranks(group)
    # Sorted by the size of the whole: tensor-parallel ranks, whose parts may differ by a row, then gather the same
    # matrices together.
    owners = [ranks[place] for place in balanced([p.numel() for p in parameters], len(ranks))]
    own_rank = ranks[dist.get_rank(group)]
    optimizer.own = {p for p, owner in zip(parameters, owners, strict=True) if owner == own_rank}

    optimizer.register_step_post_hook(lambda *_: broadcast_from_owners(parameters, owners, group))


def broadcast_from_owners(parameters: Sequence[Tensor], owners: Sequence[int], group: dist.ProcessGroup | None) -> None:
    """Give all ranks of a group the parameters of the rank that owns each."""
    # In place, so that no memory is needed; all at once, so that those of different ranks can overlap.
    sending = [
        dist.broadcast(local(parameter.detach()), owner, group, async_op=True)
        for parameter, owner in zip(parameters, owners, strict=True)
    ]
    for work in filter(None, sending):
        work.wait()


def balanced(sizes: Sequence[int], parts: int) -> list[int]:
    """Divide things of these sizes into parts of similar size. Returns the part of each; part 0 is the largest.

    The largest thing first, into the part that is smallest so far: the largest part is at most 4/3 of the best one
    (Graham 1969).

    >>> balanced([2, 9, 3, 4], 2)
    [1, 0, 1, 1]
    """
    totals, part_of = [0] * parts, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        part_of[index] = min(range(parts), key=totals.__getitem__)
        totals[part_of[index]] += sizes[index]
    by_size = sorted(range(parts), key=lambda part: -totals[part])
    return [by_size.index(part) for part in part_of]
