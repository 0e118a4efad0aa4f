"""Other libraries as witnesses: tests marked `peers` compare with them, and `make peers` runs these tests."""

import importlib
import os
from typing import Any

import pytest


def peer(module: str) -> Any:
    """A module of another library. Where it is not installed the test is skipped; in `make peers` it fails."""
    if "NAPKIN_PEERS" in os.environ:
        return importlib.import_module(module)
    return pytest.importorskip(module, reason=f"{module} is not installed: make peers", exc_type=ImportError)
