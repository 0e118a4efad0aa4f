"""A reward function of the user's, FILE.py:NAME, in a process of its own with limits.

The function is trusted, but what it reads is a model's: its process writes no files and, where the system
can confine it, makes no processes and no connections once the file has been loaded.

`ConfinedProcess` starts one and talks with it in lines of JSON, until it ends or its time is over.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from napkin.child_process import AnsweringProcess, start_answering, stop_session
from napkin.errors import NapkinError, NotJudged
from napkin.grading.sandbox.confinement import can_confine, confine, limit_resources
from napkin.grading.sandbox.program_roles import write_line

_MAIN = "from napkin.grading.sandbox.own_function import main; main()"
MOST_LINE = 2**22
"""Bytes of an answer."""


MOST_SECONDS = 10.0
"""The limit of a call."""
_LOADING_SECONDS = 120.0
_MEMORY = 16 * 2**30
_PROCESSOR_SECONDS = 2**31 - 1


class OwnFunction:
    """Calls a function of a file; the process is started by `load` or at first use, and again after it was ended."""

    def __init__(self, path: str, name: str, *, most_seconds: float = MOST_SECONDS) -> None:
        if not Path(path).is_file():
            raise NapkinError(f"'{path}' is not a file: name a reward function as FILE.py:NAME")
        self._path, self._name, self._most_seconds = str(Path(path).resolve()), name, most_seconds
        self._process: ConfinedProcess | None = None
        self._lock = threading.Lock()

    def __call__(self, answer: str, reference: str) -> float:
        """The function's value. Raises NotJudged where it raises, takes too long, or ends its process."""
        with self._lock:
            process = self._process = self._process or self._started()
            process.send({"answer": answer, "reference": reference})
            reply = process.receive(self._most_seconds)
            if reply is None:
                late = process.late
                self._end()
                raise NotJudged(
                    f"{self._name} took longer than {self._most_seconds:g} s"
                    if late
                    else f"{self._name} ended its process, or needs more memory than it may have"
                )
        if "error" in reply:
            raise NotJudged(str(reply["error"]))
        return float(reply["reward"])

    def load(self) -> None:
        """Start the process. Raises NapkinError where the file cannot be loaded or has no such function."""
        with self._lock:
            self._process = self._process or self._started()

    def close(self) -> None:
        with self._lock:
            self._end()

    def __del__(self) -> None:
        self._end()

    def _started(self) -> "ConfinedProcess":
        limits = {"memory": _MEMORY, "seconds": _PROCESSOR_SECONDS}
        process = ConfinedProcess({**limits, "path": self._path, "name": self._name})
        loaded = process.receive(_LOADING_SECONDS)
        if loaded is None or "error" in loaded:
            process.end()
            why = "its process ended" if loaded is None else loaded["error"]
            raise NapkinError(f"'{self._path}:{self._name}' cannot be loaded ({why}): correct it")
        return process

    def _end(self) -> None:
        if getattr(self, "_process", None) is not None:
            assert self._process is not None
            self._process.end()
            self._process = None


class ConfinedProcess:
    """A process of `own_function_main`, with the environment and the paths for modules of this process."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.late = False
        try:
            self._process: AnsweringProcess = start_answering(_MAIN, own_session=True)
        except OSError as error:
            raise NotJudged(f"a confined process cannot be started ({error.strerror})") from None
        self.send(request)

    def send(self, request: dict[str, Any]) -> None:
        """Write a line to it; lines to a process that has ended are lost."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next line; None if the process ended, wrote something else, or took longer, which is `late` then."""
        assert self._process.stdout is not None
        with self.ends_after(seconds):
            line = self._process.stdout.readline(MOST_LINE)
        try:
            answer = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None

    @contextlib.contextmanager
    def ends_after(self, seconds: float) -> Iterator[None]:
        """The process is killed if the block takes longer, which ends the block's waiting."""

        def kill() -> None:
            self.late = True
            stop_session(self._process)

        timer = threading.Timer(max(seconds, 0.0), kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def end(self) -> None:
        """Kill it and all that it started."""
        stop_session(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()


# The program of that process: lines of JSON, an answer and a reference in, a reward out.


def main() -> None:
    """Load the function that the first line names, give up what it does not need, and answer the lines that follow."""
    request = json.loads(sys.stdin.buffer.readline())
    limit_resources(request["memory"], request["seconds"])
    answers = sys.stdout
    sys.stdout = sys.stderr
    try:
        function = _loaded(request["path"], request["name"])
        write_line(answers, {"loaded": True})
    except BaseException as error:
        write_line(answers, {"error": f"{type(error).__name__}: {str(error)[:200]}"})
        return
    if can_confine():
        confine("reading")
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        try:
            reward = function(asked["answer"], asked["reference"])
            if not isinstance(reward, bool | int | float):
                reward = reward.item() if hasattr(reward, "item") else reward
            if not isinstance(reward, bool | int | float):
                raise TypeError(f"the reward is of type {type(reward).__name__}: a number is needed")
            write_line(answers, {"reward": repr(float(reward))})
        except Exception as error:
            write_line(answers, {"error": f"{type(error).__name__}: {str(error)[:200]}"})


def _loaded(path: str, name: str) -> Callable[[str, str], Any]:
    import runpy

    sys.path.append(os.path.dirname(path))
    function = runpy.run_path(path).get(name)
    if not callable(function):
        raise NameError(f"it has no function {name}")
    return function
