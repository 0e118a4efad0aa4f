"""Counts of steps that several tests share: a step's ledger follows from its recipe, and tests plan the same few."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from napkin.accounting.ledger import Ledger
from napkin.planning.planner import step_key
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step import step_ledger

_ledgers: dict[str, Ledger] = {}


@contextmanager
def shared_counts() -> Iterator[None]:
    """In the block each step is counted once per process, whichever module of napkin or of the tests asks."""
    count_step = step_ledger.count_step

    def count(resolved: ResolvedRecipe, rank: int = 0, *, progress: Any = None, **settings: Any) -> Ledger:
        devices = resolved.precision, resolved.target, resolved.world_size, rank
        # Attention's scratch grows with the threads.
        step = repr((step_key(resolved.recipe), devices, sorted(settings.items()), torch.get_num_threads()))
        if step not in _ledgers:
            _ledgers[step] = count_step(resolved, rank, progress=progress, **settings)
        return _ledgers[step]

    with pytest.MonkeyPatch.context() as patch:
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("count_step") is count_step:
                patch.setattr(module, "count_step", count)
        yield
