"""How torch.compile is set up here: where and what it keeps, and how its compilers are stopped."""

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
    """Have torch keep machine code alone, in a folder of the user's, and of that whole files only.

    Its own choice is a folder in /tmp, into which others may write first; and what it knows of graphs it would keep as
    pickles, and read them.
    """
    from torch._dynamo import config as tracing
    from torch._functorch import config as differentiating
    from torch._inductor import config as generating
    from torch._inductor import cpp_builder
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch writes its own choice there as soon as it has looked for it.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) == default_cache_dir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder() / "torch")
    tracing.automatic_dynamic_local_pgo = False
    differentiating.enable_autograd_cache = False
    generating.fx_graph_cache = False
    # They would lie in /tmp whatever is said.
    generating.cpp_cache_precompile_headers = False
    if os.name != "nt":
        cpp_builder.run_compile_cmd = _compile_whole


def compiled_folder() -> Path:
    """Where torch keeps what it has compiled, once the compiler is set up."""
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


@contextlib.contextmanager
def stoppable_compiler() -> Iterator[Callable[[], None]]:
    """Yield what ends the C++ compilers at work: who waits for one of them gets a KeyboardInterrupt.

    A signal's handler may call it, where raising will not do: torch computes in places that swallow exceptions.
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


def _compile_whole(cmd_line: str, cwd: str) -> None:
    """In place of torch's own: what is made gets its name when it is whole, and a compiler can be stopped.

    torch has the linker write where it looks for what is kept: a kill would leave a part, to be loaded by the next run.
    """
    from torch._inductor.exc import CppCompileError

    words = shlex.split(cmd_line)
    at = words.index("-o") + 1
    target = Path(words[at])
    temporary = temporary_name(target)
    words[at] = str(temporary)
    try:
        # A group of its own, which ends as one: the driver would leave the compiler proper behind.
        with subprocess.Popen(
            words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
        ) as process:
            _running.add(process)
            try:
                if _stopped.is_set():
                    _end(process)
                said, _ = process.communicate()
            finally:
                _end(process)
                _running.discard(process)
        if _stopped.is_set():
            # Not an error of the compiler's, which torch takes for an answer where it tries what a machine can do.
            raise KeyboardInterrupt
        if process.returncode:
            raise CppCompileError(words, said.decode(errors="replace"))
        sync_file(temporary)
        publish(temporary, target, overwrite=True)
    finally:
        temporary.unlink(missing_ok=True)


def _end(process: subprocess.Popen) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
