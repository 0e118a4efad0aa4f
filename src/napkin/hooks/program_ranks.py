"""The ranks of a watched program: each meters its own steps, and rank 0 writes the reports of all. They communicate
through the store of the program's process group, not by collectives: rank 0 waits for a rank that has failed no longer
than `PATIENCE_SECONDS`, and names it.
"""

import datetime
import itertools
import json
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch.distributed as dist

from napkin.accounting.rank_seconds import RankSeconds, on_one_clock, seconds_of_ranks
from napkin.distributed.fake_ranks import fake_ranks

PATIENCE_SECONDS = 20.0
"""The longest that rank 0 waits for the other ranks at the end of a loop."""
FAILED_PATIENCE_SECONDS = 2.0
"""The same after an error of rank 0 itself."""
_NUMBERS = itertools.count()
"""Numbers the watched loops of this process: ranks watch the same loops in the same order."""


class ProgramRanks:
    """This process among those that train together; rank 0 of 1 where the program has no process group."""

    def __init__(self) -> None:
        self.rank, self.world_size, self._store = 0, 1, None
        self._key = f"napkin watch {next(_NUMBERS)}"
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size > 1:
            # The group may be destroyed before the loop ends.
            self._store = dist.distributed_c10d._get_default_store()
        self.missing: list[int] = []
        """Ranks that had not reported when rank 0 wrote the run."""

    @property
    def has_one_clock(self) -> bool:
        """True if all ranks are known to be on one machine, and so have one clock."""
        return os.environ.get("LOCAL_WORLD_SIZE") == str(self.world_size)

    def not_talking(self) -> AbstractContextManager[Any]:
        """A context in which collectives of this process reach no other rank: what is planned is planned by one."""
        return fake_ranks(self.world_size, self.rank) if self.world_size > 1 else nullcontext()

    def tell(self, figures: dict[str, Any]) -> None:
        """Tell rank 0 what this rank has measured."""
        if self._store is not None:
            with suppress(RuntimeError):  # rank 0 has left
                self._store.set(f"{self._key} {self.rank}", json.dumps(figures))

    def gather(self, own: dict[str, Any], *, patience: float) -> list[dict[str, Any]]:
        """On rank 0: the reports of all ranks, without those that did not report within `patience` seconds."""
        gathered, deadline = [own], time.monotonic() + patience
        for rank in range(1, self.world_size):
            key = f"{self._key} {rank}"
            try:
                assert self._store is not None
                left = max(0.01, deadline - time.monotonic())
                self._store.wait([key], datetime.timedelta(seconds=left))
                gathered.append(json.loads(self._store.get(key)))
            except RuntimeError:
                self.missing.append(rank)
        return gathered


def seconds_by_rank(reports: Sequence[dict[str, Any]]) -> tuple[list[RankSeconds], int | None]:
    """Bytes and seconds of each rank's step, and the straggler; none unless all ranks have timed their collectives."""
    steps = [each["step"] for each in reports if each.get("step")]
    if not len(steps) == len(reports) > 1:
        return [], None
    steps = on_one_clock(steps) if any(step.get("own_clock") for step in steps) else steps
    return seconds_of_ranks(steps, pipelined=False)
