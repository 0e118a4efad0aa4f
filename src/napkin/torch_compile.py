"""Set-up of torch.compile: what it caches and where, and how its C++ compilers are stopped."""

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from napkin.files import cache_folder, publish, sync_file, temporary_name

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
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder() / "torch")
    tracing.automatic_dynamic_local_pgo = False
    differentiating.enable_autograd_cache = False
    generating.fx_graph_cache = False
    # They would be written to /tmp, whatever the cache folder.
    generating.cpp_cache_precompile_headers = False
    if os.name != "nt":
        cpp_builder.run_compile_cmd = _compile_atomically


def compiled_folder() -> Path:
    """Where torch caches compiled code, once `set_up_compiler` was called."""
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


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
        # In a process group, which is terminated as one: the driver alone would leave the compiler proper running.
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
            # Not a compiler error, which torch takes as the answer when it tests what a machine can do.
            raise KeyboardInterrupt
        if process.returncode:
            raise CppCompileError(words, output.decode(errors="replace"))
        sync_file(temporary)
        publish(temporary, target, overwrite=True)
    finally:
        temporary.unlink(missing_ok=True)


def _end(process: subprocess.Popen) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
