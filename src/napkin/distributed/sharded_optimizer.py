"""Optimizer state divided among ranks that have the same parameters: ZeRO stage 1 (Rajbhandari et al. 2020).

Each rank updates some of the parameters, whole ones, keeps the optimizer state of these alone, and sends them to the
others. Rules that need whole matrices, such as Muon's, have them.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from napkin.optim.base import Optimizer
from napkin.optim.sharded_tensors import local


def shard_optimizer(optimizer: Optimizer, group: dist.ProcessGroup) -> None:
    """Let this rank of a group update and keep its part alone; each step then ends with a broadcast of each parameter.

    All ranks of the group have to have the same parameters, in the same order, and the same gradients of them.
    """
    parameters: list[Tensor] = [p for each in optimizer.param_groups for p in each["params"]]
    ranks = dist.get_process_group_ranks(group)
    # By the size of the whole: ranks of tensor, whose parts may differ by a row, gather the same matrices together.
    owners = [ranks[place] for place in balanced([p.numel() for p in parameters], len(ranks))]
    own_rank = ranks[dist.get_rank(group)]
    optimizer.own = {p for p, owner in zip(parameters, owners, strict=True) if owner == own_rank}

    def exchange(*_: object) -> None:
        # In place, so that no memory is needed; all at once, so that those of different ranks can overlap.
        sending = [
            dist.broadcast(local(parameter.detach()), owner, group, async_op=True)
            for parameter, owner in zip(parameters, owners, strict=True)
        ]
        for work in filter(None, sending):
            work.wait()

    optimizer.register_step_post_hook(exchange)


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
