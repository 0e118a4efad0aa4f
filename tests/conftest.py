import os
from pathlib import Path

import pytest

WITHOUT_TORCH = {"tokenizer", "data"}
"""Rooms whose tests need no torch: loading it would take longer than they do."""


@pytest.fixture(scope="session", autouse=True)
def calibration_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A calibration takes seconds: one, and not one a test, where nobody has said where it is kept."""
    os.environ.setdefault("NAPKIN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> None:
    """Tensors are tiny here: on a busy machine threads would wait for each other most of the time."""
    if WITHOUT_TORCH.isdisjoint(Path(request.node.path).parts):
        import torch

        torch.set_num_threads(1)
