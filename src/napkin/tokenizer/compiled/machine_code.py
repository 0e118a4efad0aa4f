"""How napkin's numba functions are compiled: without checks, without Python's lock, kept in napkin's cache."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from inspect import unwrap
from typing import Any

import numba
from numba.core import config

from napkin.tokenizer.compiled.loading import code_folder

_OPTIONS = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
_SCANNER = "int64(int64, int64, int64, int64, int64, int64, int64)"

# Functions are unwrapped: a checker of types may have put one of its own around them, which cannot be compiled.
# What makes the machine code of each module's functions.
_makers: defaultdict[str, list[Callable[[], object]]] = defaultdict(list)


def compiled(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function that Python calls: compiled by `make_machine_code` or its first call, loaded from disk from then
    on."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        with _kept_in_cache():
            dispatcher = numba.njit(cache=True, **_OPTIONS)(unwrap(function))
        _makers[function.__module__].append(lambda: dispatcher.compile(signature))
        return dispatcher

    return decorate


def part(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that only compiled functions call; it is compiled into each of them."""
    return numba.njit(**_OPTIONS)(unwrap(function))


class Scanner:
    """A function that compiled functions call by its address; scanners.py says how."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = unwrap(function)
        _makers[function.__module__].append(lambda: self.address)

    @cached_property
    def address(self) -> int:
        """Where its machine code is; made at first use, loaded from disk from then on."""
        return self.compiled.address

    @cached_property
    def compiled(self) -> Any:
        """numba's C function."""
        with _kept_in_cache():
            return numba.cfunc(_SCANNER, cache=True)(self.function)


def make_machine_code(module: str) -> None:
    """Compile or load all compiled functions of a module that has been imported."""
    for make in _makers[module]:
        make()


@contextmanager
def _kept_in_cache() -> Iterator[None]:
    # numba asks where to keep machine code while it decorates; what the program wants for its own is left alone.
    settings = config.__dict__
    before = settings["CACHE_DIR"]
    settings["CACHE_DIR"] = str(code_folder())
    try:
        yield
    finally:
        settings["CACHE_DIR"] = before
