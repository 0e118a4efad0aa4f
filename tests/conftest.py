import gc
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from reliability.harness import fork_server

# A shell's background job ignores Ctrl-C, and so do the processes that it starts; tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TRAINING_ROOMS = {
    "checkpoint",
    "distributed",
    "environments",
    "evaluation",
    "planning",
    "recipe",
    "runs",
    "scaling",
    "train_step",
    "training",
    "tuning",
}
"""Rooms whose tests train tiny models."""


PLANNING_ROOMS = {
    "checkpoint",
    "cli",
    "distributed",
    "environments",
    "evaluation",
    "report",
    "runs",
    "scaling",
    "training",
    "tuning",
}
"""Rooms whose tests plan a step on the way to something else."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most of the parameters of a sampled test to `make thorough`."""
    seen: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is None or item.get_closest_marker("torture"):
            continue
        function = item.nodeid.partition("[")[0]
        if seen[function] % sampled.kwargs["every"]:
            item.add_marker(pytest.mark.thorough)
        seen[function] += 1


@pytest.fixture(scope="session", autouse=True)
def nothing_imported_is_collected() -> None:
    """A metered step collects garbage before it: modules and collected tests, millions of objects, are none."""
    import torch._dynamo
    import torch._inductor
    import torch.distributed.fsdp

    assert torch
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def calibration_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Calibrations and machine code take seconds: one cache for the tests of all processes, where nobody has said where
    it is kept."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ.setdefault("NAPKIN_CACHE_DIR", str(shared / "napkin-cache"))
    # A test that is about the choice of forms says so: all others compute alike on each machine.
    os.environ.setdefault("NAPKIN_FORMS", "default")


@pytest.fixture(scope="session")
def server(calibration_cache: None) -> Iterator[subprocess.Popen[str]]:
    """Starts commands in milliseconds, for `reliability.harness.Napkin`."""
    with fork_server() as server:
        yield server


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> None:
    """Tensors are tiny here: on a busy machine threads would wait for each other most of the time."""
    if not TRAINING_ROOMS.isdisjoint(Path(request.node.path).parts):
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def planned_on_the_way(request: pytest.FixtureRequest, calibration_cache: None) -> Iterator[None]:
    """Most of a tiny run's time is its plan: rooms that have another subject plan equal steps once."""
    if PLANNING_ROOMS.isdisjoint(Path(request.node.path).parts):
        yield
        return
    from oracles.shared_counts import shared_plans

    with shared_plans():
        yield
