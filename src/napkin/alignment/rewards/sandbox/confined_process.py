"""Starting a confined process and talking with it in lines of JSON, until it ends or its time is over."""

import contextlib
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import napkin
from napkin.alignment.rewards.reward import RewardFailure
from napkin.child_process import AnsweringProcess, start_answering, start_bare, stop_session

_MAIN = "from napkin.alignment.rewards.sandbox.confined_main import main; main()"
_BARE = f"import sys; sys.path.insert(0, sys.argv[1]); {_MAIN}"
MOST_LINE = 2**22
"""Bytes of an answer."""


class ConfinedProcess:
    """A process of `confined_main`, in an empty folder and with an empty environment.

    With `own` it runs a function of the user's, and has the environment and the paths for modules of this process.
    """

    def __init__(self, told: dict[str, Any], *, own: bool = False) -> None:
        self.late = False
        self._folder = None if own else tempfile.mkdtemp(prefix="napkin-")
        try:
            if self._folder is None:
                self._process: AnsweringProcess = start_answering(_MAIN, own_session=True)
            else:
                source = str(Path(napkin.__file__).parent.parent)
                self._process = start_bare(_BARE, source, folder=self._folder)
        except OSError as error:
            self._remove_folder()
            raise RewardFailure(f"a confined process cannot be started ({error.strerror})") from None
        self.send(told)

    def __enter__(self) -> "ConfinedProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

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

    def output(self, most_bytes: int, seconds: float) -> bytes | None:
        """All that it writes until it ends with status 0; None otherwise, and for more than `most_bytes`."""
        assert self._process.stdout is not None
        with self.ends_after(seconds):
            written = self._process.stdout.read(most_bytes + 1)
            if len(written) > most_bytes:
                return None
            status = self._process.wait()
        return written if status == 0 else None

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
        """Kill it and all that it started, and remove its folder."""
        stop_session(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
