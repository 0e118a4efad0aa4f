"""These tests run what Triton's compiler makes of the kernels, which its interpreter would take the place of."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave these tests to `make peers`."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.peers)
            if interpreted or (find_spec("triton") is None and "NAPKIN_PEERS" not in os.environ):
                item.add_marker(pytest.mark.skip(reason="needs triton, without TRITON_INTERPRET: make peers"))


@pytest.fixture(autouse=True)
def compiled_once(calibration_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what Triton compiles where the tests keep machine code."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(Path(os.environ["NAPKIN_CACHE_DIR"]) / "triton"))
