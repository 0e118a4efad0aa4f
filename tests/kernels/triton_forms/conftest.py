"""These tests run Triton's interpreter, which is chosen by the environment before triton is imported."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# They import the kernels themselves.
collect_ignore = [] if find_spec("triton") else ["test_fp8_triton.py", "test_launch_grids.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave these tests to `make peers`, which chooses the interpreter; elsewhere they are skipped."""
    ready = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.peers)
            if not ready and "NAPKIN_PEERS" not in os.environ:
                item.add_marker(pytest.mark.skip(reason="needs triton and TRITON_INTERPRET=1: make peers"))
