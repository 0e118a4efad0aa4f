"""Joining the ranks of this process's job; a single process does not import torch.distributed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from napkin.distributed.ranks import Ranks, rank_info_of
from napkin.recipe.training_config import TrainingConfig


@contextmanager
def join_ranks(training: TrainingConfig) -> Iterator[Ranks]:
    """The ranks of this process's job while the block runs; every rank waits at its end for the others.

    Raises NapkinError, in one line, where another process has exited or does not answer within `rank_timeout` seconds.
    """
    if training.deterministic:
        from napkin.kernels.deterministic import fix_cublas_workspace

        fix_cublas_workspace()
    info = rank_info_of(os.environ)
    if info.world_size == 1:
        yield Ranks(info)
        return
    from napkin.distributed.process_group import join

    with join(info, device=training.device, timeout=training.rank_timeout) as ranks:
        yield ranks
