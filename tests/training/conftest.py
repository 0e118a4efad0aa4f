import os

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def calibration_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A calibration takes seconds: one, and not one a test, where nobody has said where it is kept."""
    os.environ.setdefault("NAPKIN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tensors are tiny here: on a busy machine threads would wait for each other most of the time."""
    torch.set_num_threads(1)
