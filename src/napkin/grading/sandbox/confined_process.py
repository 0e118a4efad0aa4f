"""Starting a confined process and talking with it in lines of JSON, until it ends or its time is over."""

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

from napkin.child_process import AnsweringProcess, start_answering, stop_session
from napkin.errors import NotJudged

_MAIN = "from napkin.grading.sandbox.own_function_main import main; main()"
MOST_LINE = 2**22
"""Bytes of an answer."""


class ConfinedProcess:
    """A process of `own_function_main`, with the environment and the paths for modules of this process."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.late = False
        try:
            self._process: AnsweringProcess = start_answering(_MAIN, own_session=True)
        except OSError as error:
            raise NotJudged(f"a confined process cannot be started ({error.strerror})") from None
        self.send(told)

    def send(self, told: dict[str, Any]) -> None:
        """Write a line to it; what is written to a process that is gone is lost."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Its next line; None if it ended, wrote something else, or took longer, which is `late` then."""
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
