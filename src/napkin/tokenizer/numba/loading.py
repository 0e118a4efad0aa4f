"""Loading the compiled core: the modules with compiled functions, their machine code built once and cached on disk.

Building takes about half a minute, loading about half a second. See dispatch.py for when either is worth it.
"""

import importlib
import os
import subprocess
import sys
from typing import Any

from napkin.tokenizer.numba.code_cache import is_cached, mark_cached

# Pre-tokenization patterns that have a scanner: the one function of the module `scan_NAME`.
COMPILED_PATTERNS = ("gpt2", "gpt4", "cl100k", "o200k", "whole")

_loaded: set[str] = set()


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
    if missing := not_cached(modules):
        _build(missing)
    for module in modules:
        _load(module)


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


def _build(modules: list[str]) -> None:
    """Build machine code, one process per module: numba compiles one function at a time in each process."""
    message = "napkin: compiling the tokenizer for this machine (once, about half a minute)"
    print(message, file=sys.stderr, flush=True)
    command = [sys.executable, "-c", f"from {__name__} import _load; import sys; _load(sys.argv[1])"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    waiting, running = list(modules), []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            running.append(_start([*command, waiting.pop()], environment))
        process = running.pop(0)
        # A failure is harmless: this process then compiles the module itself, and raises the error if there is one.
        if process is not None:
            process.wait()


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError:
        return None


def _load(name: str) -> None:
    from napkin.tokenizer.numba.jit import compile_module

    module = importlib.import_module(f"{__package__}.{name}")
    compile_module(module.__name__)
    _loaded.add(name)
    mark_cached(name)
