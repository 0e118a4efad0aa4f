"""These tests run Triton's interpreter, which has to be chosen before triton is imported: `make triton`."""

import os
from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if find_spec("triton") is None:
        reason = "triton is not installed: make triton"
    elif os.environ.get("TRITON_INTERPRET") != "1":
        reason = "TRITON_INTERPRET is not 1: make triton"
    for item in items:
        if reason and item.path.is_relative_to(os.path.dirname(__file__)):
            item.add_marker(pytest.mark.skip(reason=reason))
