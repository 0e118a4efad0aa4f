"""Child processes: they begin in the root folder and import nothing from the folder in which the user works.

`python -c` and `python -m` look for modules in the current folder first, so a file beside the user's text could take
the place of a library. PYTHONPATH still counts: the user has set it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

_ROOT = os.path.abspath(os.sep)

AnsweringProcess = subprocess.Popen[bytes]
"""A process of `start_answering`, with pipes for requests and answers."""


def start_python(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start Python on `code`, with this process's paths for modules; its standard error can be read, the rest is lost.

    Raises OSError if it cannot be started.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, *arguments],
        env={**_own_environment(), **environment},
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C is answered after the block: a process that is being started would be left behind unnoticed.

    Only the main thread is interrupted; in others there is nothing to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        # None stands for a handler that was not set from Python.
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if came:
            signal.raise_signal(signal.SIGINT)


def start_answering(code: str, *, own_session: bool = False) -> AnsweringProcess:
    """Start Python on `code` that reads lines from its standard input and writes an answer to each; errors are lost.

    With `own_session` the terminal's signals, such as Ctrl-C, do not reach it. Raises OSError if it cannot be started.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        env=_own_environment(),
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=own_session,
    )


def start_bare(code: str, *arguments: str, standard_input: int) -> AnsweringProcess:
    """Start Python on `code` with a descriptor as its input, without this process's environment variables and without
    installed packages.

    Hashes are the same in each such process. Raises OSError if it cannot be started.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-s", "-S", "-B", "-c", code, *arguments],
        env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        cwd=_ROOT,
        stdin=standard_input,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def start_script(
    code: str, *arguments: str, folder: str, environment: Mapping[str, str], output: IO[bytes]
) -> AnsweringProcess:
    """Start Python on `code` in a folder of its own, in a session of its own; what it prints goes to `output`.

    Raises OSError if it cannot be started.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, *arguments],
        env={**_own_environment(), **environment},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def stop_session(process: AnsweringProcess) -> None:
    """Kill a process that was started in a session of its own, and what it started there."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg") and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        process.kill()


def _own_environment() -> dict[str, str]:
    """The environment of this process, with its module search path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path)}


def failure_of(process: subprocess.Popen[str]) -> str | None:
    """Wait for a process of `start_python`; why it failed, in one line, or None if it did not."""
    _, output = process.communicate()
    if process.returncode == 0:
        return None
    if process.returncode < 0:
        return f"signal {-process.returncode}"
    lines = output.strip().splitlines()
    return lines[-1] if lines else f"exit status {process.returncode}"


def run_program(
    command: Sequence[str], standard_input: bytes = b"", *, most_seconds: float | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end and return its output.

    Raises OSError if it cannot be started, TimeoutError if it was ended because it took more than `most_seconds`.
    """
    try:
        return subprocess.run(
            command, input=standard_input, capture_output=True, check=False, cwd=_ROOT, timeout=most_seconds
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"it took more than {most_seconds:g} s") from None
