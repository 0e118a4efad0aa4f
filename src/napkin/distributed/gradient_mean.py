"""The mean of gradients over ranks that hold the same parameters, begun when they are complete, waited for later."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from napkin.optim.base import buckets
from napkin.optim.sharded_tensors import local


class GradientMean:
    """All-reduces, in place, gradients that no backward pass adds to any more.

    DDP would do it from within the backward pass, which the schedules with split backward passes do not run as a whole.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group` are the ranks; None is this rank alone."""
        self.group = group
        self._running: list[tuple[Any, Tensor, list[Tensor]]] = []

    def start(self, gradients: Sequence[Tensor]) -> None:
        """Begin to average these; all ranks of the group give the same ones in the same order."""
        if self.group is None:
            return
        ranks = dist.get_world_size(self.group)
        for bucket in buckets(map(local, gradients)):
            torch._foreach_div_(bucket, ranks)  # pyright: ignore[reportPrivateImportUsage]
            # Small gradients are sent together.
            alone = len(bucket) == 1 and bucket[0].is_contiguous()
            flat = bucket[0] if alone else torch.cat([gradient.flatten() for gradient in bucket])
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            self._running.append((work, flat, bucket))

    def finish(self) -> None:
        """Wait until all that has begun is averaged."""
        for work, flat, bucket in self._running:
            work.wait()
            if flat is not bucket[0]:
                for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(mean.view_as(gradient))
        self._running.clear()
