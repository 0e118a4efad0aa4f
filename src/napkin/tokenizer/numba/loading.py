"""Loading the compiled core: the modules with compiled functions, their machine code built once and cached on disk.

Building takes about half a minute, loading about half a second. See dispatch.py for when either is worth it.
"""

import importlib
import os
import sys
import threading
from typing import Any

from napkin.child_process import failure_of, start_python
from napkin.files import cache_folder
from napkin.tokenizer.numba.code_cache import code_folder, is_cached, read_code, write_code

# Pre-tokenization patterns that have a scanner: the one function of the module `scan_NAME`.
COMPILED_PATTERNS = ("gpt2", "gpt4", "cl100k", "o200k", "qwen2", "whole")

_loaded: set[str] = set()
_loading = threading.Lock()


def modules_for_encoding(pattern: str) -> tuple[str, ...]:
    """The modules of this folder whose compiled functions encode text that is split by `pattern`."""
    return "pre_token_table", "apply_merges", "encode_documents", f"scan_{pattern}"


def modules_for_training(pattern: str) -> tuple[str, ...]:
    """The modules of this folder whose compiled functions train on text that is split by `pattern`."""
    return "pre_token_table", "count_documents", "pair_table", "learn_merges", f"scan_{pattern}"


def load(*modules: str) -> None:
    """Load modules of this folder with their machine code; what is not cached is built first, with a message."""
    if is_loaded(modules):
        return
    with _loading:
        missing = [module for module in dict.fromkeys(modules) if not (module in _loaded or _load_cached(module))]
        if missing:
            message = "napkin: compiling the tokenizer for this machine (once, about half a minute)"
            print(message, file=sys.stderr, flush=True)
            if code_folder():
                _build(missing)
        for module in missing:
            if not _load_cached(module):
                _compile(module)


def is_loaded(modules: tuple[str, ...]) -> bool:
    """Whether this process has loaded all of the modules."""
    return _loaded.issuperset(modules)


def not_cached(modules: tuple[str, ...]) -> list[str]:
    """Those of the modules whose machine code is neither loaded nor on disk."""
    return [module for module in modules if module not in _loaded and not is_cached(module)]


def scanner_of(pattern: str) -> Any:
    """The scanner of a pattern whose modules are loaded."""
    name = f"scan_{pattern}"
    return getattr(importlib.import_module(f"{__package__}.{name}"), name)


def build_module(name: str) -> None:
    """Compile a module of this folder and cache its machine code: what a child process of `load` does."""
    write_code(name, _compiled(name))


def _build(modules: list[str]) -> None:
    """Build machine code, one process per module: numba compiles one function at a time in each process."""
    code = f"from {__name__} import build_module; import sys; build_module(sys.argv[1])"
    # The child process begins in another folder.
    cache = {"NAPKIN_CACHE_DIR": str(cache_folder().absolute())}
    waiting, running = list(modules), []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            name = waiting.pop()
            try:
                running.append((name, start_python(code, name, **cache)))
            except OSError as error:
                _tell_failure(name, error.strerror or str(error))
        if running:
            name, process = running.pop(0)
            if failure := failure_of(process):
                _tell_failure(name, failure)


def _tell_failure(module: str, why: str) -> None:
    # This process then compiles the module itself, and raises the error if there is one.
    line = f"napkin: a process that compiles '{module}' failed ({why}): it is compiled here"
    print(line, file=sys.stderr, flush=True)


def _load_cached(name: str) -> bool:
    """Load a module with its cached machine code; False if there is none."""
    code = read_code(name)
    if code is not None:
        _load(name, code)
    return code is not None


def _compile(name: str) -> None:
    _load(name, _compiled(name))


def _compiled(name: str) -> dict[str, bytes]:
    from napkin.tokenizer.numba.jit import compile_module

    return compile_module(importlib.import_module(f"{__package__}.{name}").__name__)


def _load(name: str, code: dict[str, bytes]) -> None:
    from napkin.tokenizer.numba.jit import load_module

    load_module(importlib.import_module(f"{__package__}.{name}").__name__, code)
    _loaded.add(name)
