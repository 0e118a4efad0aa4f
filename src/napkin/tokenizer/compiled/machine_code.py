"""How napkin's numba functions are compiled: without checks, without Python's lock, kept on disk."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Python calls: compiled at its first call, loaded from disk from then on."""
    return numba.njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")(function)


def part(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that only compiled functions call; it is compiled into each of them."""
    return numba.njit(nogil=True, boundscheck=False, error_model="numpy")(function)


class Scanner:
    """A function that compiled functions call by its address; scanners.py says how."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @cached_property
    def address(self) -> int:
        """Where its machine code is; made at first use, loaded from disk from then on."""
        return self.compiled.address

    @cached_property
    def compiled(self) -> Any:
        """numba's C function."""
        return numba.cfunc("int64(int64, int64, int64, int64, int64, int64, int64)", nopython=True, cache=True)(
            self.function
        )
