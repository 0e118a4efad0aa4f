"""Loading modules with compiled functions: their machine code is built once, and cached on disk.

The cache is a folder per package with a file per module, in napkin's own format:

    64 hexadecimal digits: the SHA-256 of what follows the line feed
    JSON: {"FUNCTION": number of bytes, ...}
    the object code of the functions, one after another

It is run, so a file counts only if it is this user's own (files.py) and its SHA-256 is right; any other is
removed and made again.
"""

import contextlib
import hashlib
import importlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path

from napkin.child_process import failure_of, start_python
from napkin.errors import NapkinError
from napkin.files import atomic_write_bytes, cache_folder, private_folder, read_private_file, try_lock
from napkin.machine_code.processor import processor_name_and_features


class MachineCode:
    """The modules of a package that hold compiled functions, each named by its path from there, as in "loss.rows".

    `message` is printed when some are built. All that they compile stands in files below the package whose names match
    `pattern`. Threads may load modules at the same time.
    """

    def __init__(self, package: str, message: str, pattern: str = "*.py") -> None:
        self._package = package
        self._message = message
        self._pattern = pattern
        self._cache = CodeCache(package, pattern)
        self._loaded: set[str] = set()
        self._loading = threading.Lock()

    def load(self, *modules: str) -> None:
        """Load modules with their machine code; what is not cached is built first, with the message."""
        if self.is_loaded(modules):
            return
        with self._loading:
            missing = [name for name in dict.fromkeys(modules) if not (name in self._loaded or self._load_cached(name))]
            if missing:
                print(self._message, file=sys.stderr, flush=True)
                if self._cache.takes_files():
                    self._build(missing)
            for name in missing:
                if not self._load_cached(name):
                    self._load(name, self._compiled(name))

    def is_loaded(self, modules: tuple[str, ...]) -> bool:
        return self._loaded.issuperset(modules)

    def not_cached(self, modules: tuple[str, ...]) -> list[str]:
        """The names of given modules whose machine code is neither loaded nor on disk."""
        return [name for name in modules if name not in self._loaded and not self._cache.has(name)]

    def build(self, module: str) -> None:
        """Compile a module and cache its machine code, unless another process does: what a child process of `load`
        does."""
        with self._cache.locked(module):
            if not self._cache.has(module):
                self._cache.write(module, self._compiled(module))

    def _build(self, modules: list[str]) -> None:
        """Build machine code, one process per module: numba compiles one function at a time in each process."""
        code = f"""
import sys
from {__name__} import MachineCode
package, pattern, module = sys.argv[1:]
MachineCode(package, "", pattern).build(module)
"""
        # The child process begins in another folder.
        cache = {"NAPKIN_CACHE_DIR": str(cache_folder().absolute())}
        waiting, running = list(modules), []
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                name = waiting.pop()
                try:
                    running.append((name, start_python(code, self._package, self._pattern, name, **cache)))
                except OSError as error:
                    _tell_failure(name, error.strerror or str(error))
            if running:
                name, process = running.pop(0)
                if failure := failure_of(process):
                    _tell_failure(name, failure)

    def _load_cached(self, name: str) -> bool:
        """Load a module with its cached machine code; False if there is none."""
        code = self._cache.read(name)
        if code is not None:
            self._load(name, code)
        return code is not None

    def _compiled(self, name: str) -> dict[str, bytes]:
        from napkin.machine_code.compiled_function import compile_module

        return compile_module(self._import(name))

    def _load(self, name: str, code: dict[str, bytes]) -> None:
        from napkin.machine_code.compiled_function import load_module

        load_module(self._import(name), code)
        self._loaded.add(name)

    def _import(self, name: str) -> str:
        return importlib.import_module(f"{self._package}.{name}").__name__


def _tell_failure(module: str, why: str) -> None:
    # This process then compiles the module itself, and raises the error if there is one.
    line = f"napkin: a process that compiles '{module}' failed ({why}): it is compiled here"
    print(line, file=sys.stderr, flush=True)


MOST_SECONDS = 120.0
"""The longest time that a process waits for another that makes the same code: making the largest module takes half a
minute of an idle core, several times that beside other programs, and forever if that process is suspended."""
_NEEDED_BYTES = 2**20
"""Bytes that must be free where machine code is to be kept: several times those of the largest module."""


class CodeCache:
    """The machine code of modules of a package and the folders below it, each named by its path from there.

    What they compile must stand in files of these folders whose names match `pattern`: such sources are a part of the
    key. If no folder for the code can be made, nothing is cached.
    """

    def __init__(self, package: str, pattern: str = "*.py") -> None:
        self._package = package
        self._pattern = pattern

    def has(self, module: str) -> bool:
        """True if there is a file with the machine code of a module; it may be damaged."""
        return self.folder is not None and self._file(self.folder, module).exists()

    def takes_files(self) -> bool:
        """True if machine code can be cached; if a folder that exists takes none, a line says so."""
        if self.folder is None:
            return False
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(bytes(_NEEDED_BYTES))
        except OSError as error:
            why, way_out = error.strerror, "make it writable, free space, or choose another NAPKIN_CACHE_DIR"
            line = f"napkin: '{self.folder}' keeps no machine code ({why}), each process compiles it: {way_out}"
            print(line, file=sys.stderr, flush=True)
            return False
        return True

    def read(self, module: str) -> dict[str, bytes] | None:
        """The object code of a module's functions; None if it is not cached. A damaged file is removed."""
        if self.folder is None or not self.has(module):
            return None
        file = self._file(self.folder, module)
        code = _parse(read_private_file(file) or b"")
        if code is None:
            with contextlib.suppress(OSError):
                file.unlink()
        return code

    def write(self, module: str, code: dict[str, bytes]) -> None:
        """Cache the object code of a module's functions; where that is impossible, nothing happens."""
        if self.folder is None:
            return
        sizes = json.dumps({name: len(part) for name, part in code.items()})
        content = b"\n".join([sizes.encode(), b"".join(code.values())])
        digest = hashlib.sha256(content).hexdigest().encode()
        with contextlib.suppress(OSError, NapkinError):
            atomic_write_bytes(self._file(self.folder, module), digest + b"\n" + content, overwrite=True)

    @contextlib.contextmanager
    def locked(self, module: str) -> Iterator[None]:
        """Hold a lock while the code of a module is made, so that ranks, which start together, make it once. No process
        waits for longer than `MOST_SECONDS`, or at all on systems without such locks."""
        descriptor = None
        with contextlib.suppress(OSError):
            if self.folder is not None:
                # Windows has no flag for links.
                flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
                descriptor = os.open(self.folder / f"{module}.lock", flags, 0o600)
                until = time.monotonic() + MOST_SECONDS
                while not try_lock(descriptor) and time.monotonic() < until:
                    time.sleep(0.05)
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    @cached_property
    def folder(self) -> Path | None:
        """The folder for these sources, this Python, this numba and this type of processor; None if there can be
        none."""
        from importlib.metadata import version

        key = hashlib.sha256()
        for part in (self._package, sys.version, version("numba"), version("llvmlite"), processor_name_and_features()):
            key.update(part.encode() + b"\0")
        for package, pattern in (("napkin.machine_code", "*.py"), (self._package, self._pattern)):
            folders = import_module(package).__path__
            for file in sorted(file for folder in folders for file in Path(folder).rglob(pattern)):
                key.update(file.read_bytes())
        return private_folder(cache_folder() / "machine-code" / key.hexdigest()[:16])

    def _file(self, folder: Path, module: str) -> Path:
        return folder / f"{module}.code"


def _parse(file: bytes) -> dict[str, bytes] | None:
    digest, _, content = file.partition(b"\n")
    if digest != hashlib.sha256(content).hexdigest().encode():
        return None
    head, _, objects = content.partition(b"\n")
    code: dict[str, bytes] = {}
    for name, size in json.loads(head).items():
        code[name], objects = objects[:size], objects[size:]
    return code
