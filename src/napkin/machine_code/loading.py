"""Loading modules with compiled functions: their machine code is built once, and cached on disk."""

import importlib
import os
import sys
import threading

from napkin.child_process import failure_of, start_python
from napkin.files import cache_folder
from napkin.machine_code.code_cache import CodeCache


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
                if self._cache.folder:
                    self._build(missing)
            for name in missing:
                if not self._load_cached(name):
                    self._load(name, self._compiled(name))

    def is_loaded(self, modules: tuple[str, ...]) -> bool:
        return self._loaded.issuperset(modules)

    def not_cached(self, modules: tuple[str, ...]) -> list[str]:
        """The modules among these whose machine code is neither loaded nor on disk."""
        return [name for name in modules if name not in self._loaded and not self._cache.has(name)]

    def build(self, module: str) -> None:
        """Compile a module and cache its machine code, unless another process does: what a child process of `load`
        does."""
        with self._cache.held(module):
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
