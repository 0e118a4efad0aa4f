"""Set-up of torch.compile: its caches and their place, and how its C++ compilers are stopped.

torch runs what it finds in its cache without checking it. So the folder belongs to this user alone, each library has
its SHA-256 beside it, and cached source is compared with what torch has just generated; wrong files are made again.
"""

import atexit
import contextlib
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from napkin.files import (
    atomic_write_text,
    cache_folder,
    private_folder,
    publish,
    read_private_file,
    sync_file,
    temporary_name,
)

_running: set[subprocess.Popen] = set()
_stopped = threading.Event()


def set_up_compiler() -> None:
    """Make torch cache only machine code, in a folder of the user's, and only whole files.

    By default it uses a folder in /tmp, which other users may create first, and caches graphs as pickles.
    """
    from torch._dynamo import config as tracing
    from torch._functorch import config as differentiating
    from torch._inductor import config as generating
    from torch._inductor import cpp_builder
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch writes its default into the environment as soon as it has looked for it.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) == default_cache_dir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder().absolute() / "torch")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_checked(compiled_folder()))
    tracing.automatic_dynamic_local_pgo = False
    differentiating.enable_autograd_cache = False
    generating.fx_graph_cache = False
    # Otherwise they are written to /tmp, whatever the cache folder.
    generating.cpp_cache_precompile_headers = False
    if os.name != "nt":
        cpp_builder.run_compile_cmd = _compile_atomically
        _check_generated_source()


def compiled(target: Any, **options: Any) -> Any:
    """`torch.compile` of a module or a function, with caches set up as in napkin's runs; `napkin.count` counts what it
    makes of them.
    """
    import torch

    set_up_compiler()
    return torch.compile(target, **options)


def compiled_folder() -> Path:
    """The folder in which torch caches compiled code, once `set_up_compiler` was called."""
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


@cache
def _checked(folder: Path) -> Path:
    """The folder without damaged libraries; a new one, for this process, if other users may write into it."""
    private = private_folder(folder)
    if private is None:
        # Only this user may enter what mkdtemp makes.
        private = Path(tempfile.mkdtemp(prefix="napkin-torch-"))
        atexit.register(shutil.rmtree, private, ignore_errors=True)
    for library in private.glob("??/*"):
        if library.suffix in (".so", ".o") and not _is_whole(library):
            with contextlib.suppress(OSError):
                library.unlink()
    return private


def _is_whole(library: Path) -> bool:
    content, digest = read_private_file(library), read_private_file(_digest_file(library))
    return content is not None and digest is not None and _sha256(content) == digest.decode("ascii", "replace")


def _digest_file(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@cache
def _check_generated_source() -> None:
    """Make torch compare a source file that it finds in its cache with what it is about to write there."""
    from torch._inductor import codecache

    write = codecache.write

    def compare_and_write(content: str | bytes, extension: str, *arguments: Any, **settings: Any) -> tuple[str, str]:
        name, path = write(content, extension, *arguments, **settings)
        expected = content if isinstance(content, bytes) else content.encode()
        if extension in ("py", "cpp", "main.cpp", "optimized.cpp") and read_private_file(Path(path)) != expected:
            with contextlib.suppress(OSError):
                os.unlink(path)
            return write(content, extension, *arguments, **settings)
        return name, path

    codecache.write = compare_and_write


@contextlib.contextmanager
def stoppable_compiler() -> Iterator[Callable[[], None]]:
    """Yield a function that stops the running C++ compilers; whoever waits for one gets a KeyboardInterrupt.

    A signal handler can call it instead of raising: torch runs compilers in places that swallow exceptions.
    """
    from torch._inductor.async_compile import AsyncCompile

    try:
        yield _stop
    finally:
        if _stopped.is_set():
            if AsyncCompile.pool.cache_info().currsize:
                AsyncCompile.pool().shutdown(cancel_futures=True)
                AsyncCompile.pool.cache_clear()
            _stopped.clear()


def _stop() -> None:
    _stopped.set()
    for process in list(_running):
        _end(process)


def _compile_atomically(cmd_line: str, cwd: str) -> None:
    """Replaces torch's own function: the output gets its name once it is whole, and the compiler can be stopped.

    torch lets the linker write directly into the cache: a kill would leave a partial file for the next run to load.
    """
    from torch._inductor.exc import CppCompileError

    words = shlex.split(cmd_line)
    at = words.index("-o") + 1
    target = Path(words[at])
    temporary = temporary_name(target)
    words[at] = str(temporary)
    try:
        # In a process group, which is terminated as a whole: ending the driver alone would leave the compiler proper
        # running.
        with subprocess.Popen(
            words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
        ) as process:
            _running.add(process)
            try:
                if _stopped.is_set():
                    _end(process)
                output, _ = process.communicate()
            finally:
                _end(process)
                _running.discard(process)
        if _stopped.is_set():
            # Not a compiler error, which torch would take as the result of a test of the machine's abilities.
            raise KeyboardInterrupt
        if process.returncode:
            raise CppCompileError(words, output.decode(errors="replace"))
        sync_file(temporary)
        atomic_write_text(_digest_file(target), _sha256(temporary.read_bytes()), overwrite=True)
        publish(temporary, target, overwrite=True)
    finally:
        temporary.unlink(missing_ok=True)


def _end(process: subprocess.Popen) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
