"""Joining the ranks of this process's job; a process alone loads nothing of torch.distributed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from napkin.distributed.ranks import Ranks, rank_info_of
from napkin.recipe.training_config import TrainingConfig


@contextmanager
def join_ranks(training: TrainingConfig) -> Iterator[Ranks]:
    """The ranks of this process's job while the block runs; no rank leaves it before all have reached its end.

    Raises NapkinError, of one line, where another process is gone or does not answer in `rank_timeout` seconds.
    """
    info = rank_info_of(os.environ)
    if info.world_size == 1:
        yield Ranks(info)
        return
    from napkin.distributed.process_group import join

    with join(info, device=training.device, timeout=training.rank_timeout) as ranks:
        yield ranks
