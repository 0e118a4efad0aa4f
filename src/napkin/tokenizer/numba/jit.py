"""How the functions of this folder are compiled with numba: unchecked, without the GIL, cached by napkin."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from inspect import unwrap
from typing import Any

import numba
from numba.core import config

from napkin.tokenizer.numba.code_cache import code_folder

_OPTIONS = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
_SCANNER = "int64(int64, int64, int64, int64, int64, int64, int64)"

# By module: what compiles each of its functions. Functions are unwrapped first, because a runtime type checker may have
# wrapped them in one that numba cannot compile.
_compilers: defaultdict[str, list[Callable[[], object]]] = defaultdict(list)


def entry_point(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that Python calls: compiled by `compile_module` or its first call, then loaded from disk."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        with _numba_cache_in(str(code_folder())):
            dispatcher = numba.njit(cache=True, **_OPTIONS)(unwrap(function))
        _compilers[function.__module__].append(lambda: dispatcher.compile(signature))
        return dispatcher

    return decorate


def jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that only compiled functions call; it becomes a part of their machine code."""
    return numba.njit(**_OPTIONS)(unwrap(function))


class Scanner:
    """Decorate a function that compiled functions call by its address; see scanners.py."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = unwrap(function)
        _compilers[function.__module__].append(lambda: self.address)

    @cached_property
    def address(self) -> int:
        """The address of its machine code; compiled at first use, then loaded from disk."""
        return self.compiled.address

    @cached_property
    def compiled(self) -> Any:
        """numba's C function."""
        with _numba_cache_in(str(code_folder())):
            return numba.cfunc(_SCANNER, cache=True)(self.function)


def compile_module(module: str) -> None:
    """Compile, or load from disk, all compiled functions of an imported module."""
    for compile_function in _compilers[module]:
        compile_function()


@contextmanager
def _numba_cache_in(folder: str) -> Iterator[None]:
    # numba reads its cache folder while it decorates. The program's own setting is restored afterwards.
    settings = config.__dict__
    before = settings["CACHE_DIR"]
    settings["CACHE_DIR"] = folder
    try:
        yield
    finally:
        settings["CACHE_DIR"] = before
