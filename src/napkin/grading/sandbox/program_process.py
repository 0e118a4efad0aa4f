"""A program in a process of its own, which a helper forks: starting it, talking with it, and ending it in time."""

import atexit
import contextlib
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import lazy_loader
import numpy

import napkin
from napkin.child_process import start_bare, stop_session
from napkin.errors import NapkinError, NotJudged
from napkin.grading.sandbox.confinement import can_confine
from napkin.grading.sandbox.fork_server import BEGUN, READY, STATUS

MOST_LINE = 2**22
"""Bytes of an answer."""
_STARTING_SECONDS = 120.0
_CHUNK = 2**16


def require_confinement(what: str) -> None:
    """Raise NapkinError, which names what would run programs of a model, where the system cannot confine them."""
    if not can_confine():
        raise NapkinError(
            f"{what} runs programs that a model writes, and this system cannot keep them from files and the network: "
            "use Linux on x86-64 or ARM, with seccomp"
        )


class HelperLost(Exception):
    """The helper or the system ended a process, and not the program: what it would have said is not known."""


@dataclass(frozen=True)
class Printed:
    """The output of a program."""

    text: bytes
    status: int | None
    """The exit status, minus the signal if it was killed; None if nobody waited for its end."""
    is_cut: bool = False
    """True if it writes more than it may."""
    is_late: bool = False
    """True if its time was over before it ended."""


class ProgramProcess:
    """A process that plays a role of `program_roles`, until a time of `time.monotonic`; in an empty folder.

    Raises HelperLost where it cannot be started.
    """

    def __init__(self, helper: "Helper", *, memory: int, deadline: float) -> None:
        self.late = False
        self._deadline, self._unread, self._begun = deadline, bytearray(), False
        self._folder = tempfile.mkdtemp(prefix="napkin-")
        try:
            # Its processor time is limited in case nobody is left to end it.
            seconds = int(max(deadline - time.monotonic(), 0)) + 2
            self._talk, self._life = helper.fork(self._folder, {"memory": memory, "seconds": seconds})
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def __enter__(self) -> "ProgramProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def send(self, request: dict[str, Any]) -> None:
        """Write a line to it; lines to a process that has ended, or does not read in time, are lost."""
        with contextlib.suppress(OSError):
            if self._waits(self._talk):
                self._talk.sendall(json.dumps(request).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next line; None if the process ended, wrote something else, or took longer, which is `late` then. Raises
        HelperLost if something else ended it."""
        searched = 0
        while (end := self._unread.find(b"\n", searched)) < 0:
            searched = len(self._unread)
            if searched > MOST_LINE or not self._read():
                self._end_if_ended()
                return None
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None

    def output(self, most_bytes: int) -> bytes | None:
        """All that it writes until it ends with status 0; None otherwise, and for more than `most_bytes`."""
        printed = self.printed(most_bytes)
        return printed.text if printed.status == 0 else None

    def printed(self, most_bytes: int) -> "Printed":
        """The first `most_bytes` that it writes until it ends, and its status. Raises HelperLost if something else
        ended it."""
        while self._read():
            if len(self._unread) > most_bytes:
                return Printed(bytes(self._unread[:most_bytes]), None, is_cut=True)
        status = None if self.late else self._status()
        return Printed(bytes(self._unread), status, is_late=self.late)

    def end(self) -> None:
        """Kill the process without waiting for its end, since it can affect nothing outside, and remove its folder."""
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)
        self._life.close()
        self._talk.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_if_ended(self) -> None:
        """Raise HelperLost if it says no more and has not ended by itself, nor here."""
        if not self.late:
            with contextlib.suppress(OSError):
                # The process may have closed its end and still be running.
                self._life.shutdown(socket.SHUT_WR)
            self._status()

    def _read(self) -> bool:
        """Add to what is unread; False if it ended or is late. Raises HelperLost if it ended before it had begun."""
        try:
            chunk = self._talk.recv(_CHUNK) if self._waits(self._talk) else b""
        except TimeoutError:
            self.late, chunk = True, b""
        except ConnectionError:
            # The process ended before it had read everything.
            chunk = b""
        if not self._begun and not self.late:
            if not chunk:
                raise HelperLost
            self._begun, chunk = True, chunk[len(BEGUN) :]
            if not chunk:
                return self._read()
        self._unread += chunk
        return bool(chunk)

    def _status(self) -> int | None:
        """The exit status of a process that says no more; None if it is late."""
        try:
            status = self._life.recv(STATUS.size) if self._waits(self._life) else None
        except TimeoutError:
            status, self.late = None, True
        if status is None:
            return None
        if len(status) < STATUS.size:
            raise HelperLost
        return STATUS.unpack(status)[0]

    def _waits(self, on: socket.socket) -> bool:
        """Let the next operation of a socket wait no longer than until the deadline; False if that is over."""
        left = self._deadline - time.monotonic()
        self.late = self.late or left <= 0
        if not self.late:
            on.settimeout(left)
        return not self.late


class Helper:
    """A process of `fork_server`, with numpy or without, which takes several times as long to fork."""

    def __init__(self, *, with_numpy: bool) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = "napkin.grading.sandbox.fork_server"
        code = f"import sys; sys.path += sys.argv[1:]; from {module} import main; main(with_numpy={with_numpy})"
        # Where the helper finds napkin, and what napkin and programs import: nothing else of this process's paths.
        paths = {str(Path(str(each.__file__)).resolve().parent.parent) for each in (napkin, lazy_loader, numpy)}
        try:
            with theirs:
                self._process = start_bare(code, *sorted(paths), standard_input=theirs.fileno())
        except OSError as error:
            self._requests.close()
            raise NotJudged(f"the helper of the sandbox cannot be started ({error.strerror})") from None
        said = b""
        with contextlib.suppress(OSError):
            self._requests.settimeout(_STARTING_SECONDS)
            said = self._requests.recv(len(READY))
            self._requests.settimeout(None)
        if said != READY:
            self.close()
            raise NotJudged("the helper of the sandbox ended, or took too long, before it was ready")

    def fork(self, folder: str, request: dict[str, Any]) -> tuple[socket.socket, socket.socket]:
        """A new process, by the sockets of what it says and of its life. Raises HelperLost if the helper is gone."""
        talk, their_talk = socket.socketpair()
        life, their_life = socket.socketpair()
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with their_talk, their_life:
                message = json.dumps(request).encode()
                socket.send_fds(self._requests, [message], [their_talk.fileno(), their_life.fileno(), opened])
        except OSError:
            talk.close()
            life.close()
            self.close()
            raise HelperLost from None
        finally:
            os.close(opened)
        return talk, life

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def closed(self) -> bool:
        """True if the helper is known to be gone."""
        return self._requests.fileno() < 0

    def close(self) -> None:
        """End it, and all processes that it has forked."""
        self._requests.close()
        stop_session(self._process)
        self._process.wait()


_helpers: dict[bool, Helper] = {}
_lock = threading.Lock()


def helper_for(text: str) -> Helper:
    """The helper that has what a program imports. Raises NotJudged if it cannot be started."""
    with_numpy = "numpy" in text
    with _lock:
        if with_numpy not in _helpers or _helpers[with_numpy].closed:
            _helpers[with_numpy] = Helper(with_numpy=with_numpy)
        return _helpers[with_numpy]


@atexit.register
def close_helpers() -> None:
    with _lock:
        while _helpers:
            _helpers.popitem()[1].close()
