"""When the compiled core is used, and how it gets its machine code: made once, kept in napkin's cache, loaded from
there.

Importing numba and loading takes about half a second, making the machine code half a minute. A text has to be long
enough to make up for it; until then the plain forms serve.
"""

import contextlib
import hashlib
import importlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from napkin.files import cache_folder

# Bytes from which on the core is faster than the plain forms: as it is, with loading, with making it as well.
LOADED_BYTES = 2**11
KEPT_BYTES = 2**21
MISSING_BYTES = 2**25

# Patterns that have a scanner, which is the one function of the module `scan_NAME`.
COMPILED_PATTERNS = ("gpt2", "gpt4", "cl100k", "o200k", "whole")
# In the tables of the core an id takes 20 bits, and one is kept for what is no token.
LARGEST_VOCABULARY = 2**20 - 1

_loaded: set[str] = set()
_plain_bytes = 0


def can_encode(vocab_size: int, pattern: str) -> bool:
    """Whether the core knows the pattern, and its tables have room for so many ids."""
    return pattern in COMPILED_PATTERNS and vocab_size <= LARGEST_VOCABULARY


def worth_it(n_bytes: int, pattern: str) -> bool:
    """Whether the core should encode a text of about so many bytes.

    Texts that it did not encode add up: a program that goes on encoding short ones gets the core as well.
    """
    global _plain_bytes
    parts = parts_for_encoding(pattern)
    if _loaded.issuperset(parts):
        return n_bytes >= LOADED_BYTES
    _plain_bytes += n_bytes
    return _plain_bytes >= KEPT_BYTES and (_plain_bytes >= MISSING_BYTES or not missing(parts))


def worth_training(n_bytes: int, pattern: str) -> bool:
    """Whether the core should train on a text of at least so many bytes."""
    if pattern not in COMPILED_PATTERNS:
        return False
    return n_bytes >= (MISSING_BYTES if missing(parts_for_training(pattern)) else KEPT_BYTES)


def parts_for_encoding(pattern: str) -> tuple[str, ...]:
    """What encoding by a pattern needs."""
    return "cache", "merging", "encoding", f"scan_{pattern}"


def load(*parts: str) -> None:
    """Make the parts that are missing, telling the user, and load all of them.

    A part is a module of this folder with compiled functions in it.
    """
    if _loaded.issuperset(parts):
        return
    if absent := missing(parts):
        _make(absent)
    for part in parts:
        _load(part)


def parts_for_training(pattern: str) -> tuple[str, ...]:
    """What training by a pattern needs."""
    return "cache", "counting", "pairs", "learning", f"scan_{pattern}"


def scanner_of(pattern: str) -> Any:
    """The scanner of a pattern whose parts are loaded."""
    name = f"scan_{pattern}"
    return getattr(importlib.import_module(f"{__package__}.{name}"), name)


def missing(parts: tuple[str, ...]) -> list[str]:
    """Those of the parts of which no machine code is kept."""
    folder = code_folder()
    return [part for part in parts if part not in _loaded and not (folder / f"{part}.made").exists()]


@cache
def code_folder() -> Path:
    """Where the machine code of these sources, for this Python and this kind of processor, is kept."""
    from importlib.metadata import version

    key = hashlib.sha256()
    for part in (sys.version, version("numba"), version("llvmlite"), _processor()):
        key.update(part.encode() + b"\0")
    for file in sorted(Path(__file__).parent.glob("*.py")):
        key.update(file.read_bytes())
    return cache_folder() / "machine-code" / key.hexdigest()[:16]


def _processor() -> str:
    chosen = [os.environ.get(name, "") for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")]
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            described = [line for line in file.read(8192).splitlines() if line.startswith(("model name", "flags"))]
    except OSError:
        import platform

        described = [platform.machine(), platform.processor()]
    return "\n".join([*described[:2], *chosen])


def _make(parts: list[str]) -> None:
    """Make machine code, each part in a process of its own, as numba makes one at a time in each."""
    print(
        "napkin: compiling the tokenizer's core for this machine, once; half a minute or so",
        file=sys.stderr,
        flush=True,
    )
    command = [sys.executable, "-c", f"from {__name__} import _load; import sys; _load(sys.argv[1])"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    waiting, running = list(parts), []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            running.append(_start([*command, waiting.pop()], environment))
        process = running.pop(0)
        # One that fails is of no consequence: the part is then made in this process, and tells why it cannot be.
        if process is not None:
            process.wait()


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError:
        return None


def _load(part: str) -> None:
    from napkin.tokenizer.compiled.machine_code import make_machine_code

    module = importlib.import_module(f"{__package__}.{part}")
    make_machine_code(module.__name__)
    _loaded.add(part)
    marker = code_folder() / f"{part}.made"
    with contextlib.suppress(OSError):
        if not marker.exists():
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
