"""Where the machine code of the compiled core is kept between processes."""

import contextlib
import hashlib
import os
import sys
from functools import cache
from pathlib import Path

from napkin.files import cache_folder


@cache
def code_folder() -> Path:
    """The folder of the machine code for these sources, this Python, this numba and this type of processor."""
    from importlib.metadata import version

    key = hashlib.sha256()
    for part in (sys.version, version("numba"), version("llvmlite"), _processor()):
        key.update(part.encode() + b"\0")
    for file in sorted(Path(__file__).parent.glob("*.py")):
        key.update(file.read_bytes())
    return cache_folder() / "machine-code" / key.hexdigest()[:16]


def is_cached(module: str) -> bool:
    """Whether the machine code of a module of this folder is on disk."""
    return _marker(module).exists()


def mark_cached(module: str) -> None:
    """Record that the machine code of a module is on disk; an unwritable cache is no error."""
    marker = _marker(module)
    with contextlib.suppress(OSError):
        if not marker.exists():
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()


def _marker(module: str) -> Path:
    return code_folder() / f"{module}.made"


def _processor() -> str:
    overrides = [os.environ.get(name, "") for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")]
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            described = [line for line in file.read(8192).splitlines() if line.startswith(("model name", "flags"))]
    except OSError:
        import platform

        described = [platform.machine(), platform.processor()]
    return "\n".join([*described[:2], *overrides])
