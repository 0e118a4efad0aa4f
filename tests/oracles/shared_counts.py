"""Counts of steps that several tests share: a step's ledger follows from its recipe, and tests plan the same few."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from napkin.accounting.ledger import Ledger
from napkin.accounting.pricing import Price
from napkin.planning.planner import step_key
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step import step_ledger

_ledgers: dict[str, Ledger] = {}
_prices: dict[Any, list[Price]] = {}


@contextmanager
def shared_counts(modules: str = "") -> Iterator[None]:
    """In the block each step is counted once per process, whichever module of napkin or of the tests asks; or those
    alone whose names begin with `modules`."""
    count_step = step_ledger.count_step

    def count(resolved: ResolvedRecipe, rank: int = 0, *, progress: Any = None, **settings: Any) -> Ledger:
        devices = resolved.precision, resolved.target, resolved.world_size, rank
        # Attention's scratch grows with the threads.
        step = repr((step_key(resolved.recipe), devices, sorted(settings.items()), torch.get_num_threads()))
        if step not in _ledgers:
            _ledgers[step] = count_step(resolved, rank, progress=progress, **settings)
        return _ledgers[step]

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith(modules) and getattr(module, "__dict__", {}).get("count_step") is count_step:
                patch.setattr(module, "count_step", count)
        yield


@contextmanager
def shared_plans() -> Iterator[None]:
    """In the block napkin itself counts each step, and times it on this machine, once per process; what a test counts
    is counted."""
    time = ThisMachine.price

    def price(machine: ThisMachine, resolved: ResolvedRecipe, ledgers: Any, *others: Any) -> list[Price]:
        devices = machine.device_type, resolved.precision, resolved.world_size
        key = repr((step_key(resolved.recipe), devices)), *(ledger.rows for ledger in ledgers)
        if key not in _prices:
            _prices[key] = time(machine, resolved, ledgers, *others)
        return _prices[key]

    with shared_counts("napkin."), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThisMachine, "price", price)
        yield
