"""The helper process: it has its imports done and forks a process for each program, which confines itself and runs it.

A message of its socket asks for one, with three descriptors: the socket that the new process talks through, the socket
of its life, and its folder. The text of a program or of its tests never comes here: the process reads it itself, after
it has given up all but computing, so that no process finds in its memory what another one was given.

The socket of a life is the helper's alone. When its other end is shut or vanishes, the process is killed; when the
process has ended, its exit status is written there. The helper is a single thread, and kills and collects its own
children only: no number of a process is used after it has been given to another.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter
from typing import Any

from napkin.grading.sandbox.confinement import Confinement, confine, limit_descriptors, limit_resources
from napkin.grading.sandbox.program_roles import play_role

READY = b"ready"
BEGUN = b"\n"
"""The first byte that a process writes, once it has confined itself: without it, nothing was judged."""
STATUS = struct.Struct("i")
"""The message to the socket of a life: the exit code as `os.waitstatus_to_exitcode` gives it, minus the signal if
killed."""
N_DESCRIPTORS = 3
MOST_REQUEST = 4096
MOST_OPEN = 4096
"""Descriptors, of which a child has one."""

# Modules that programs may import are imported here, since children cannot open files.
MODULES = """
    __future__ abc array ast base64 binascii bisect calendar cmath collections collections.abc contextlib copy
    dataclasses datetime decimal difflib enum fractions functools hashlib heapq io itertools json keyword math numbers
    operator os queue random re secrets statistics string struct sys textwrap threading time timeit traceback types
    typing unicodedata uuid warnings zlib _strptime
    """.split()
NUMPY_MODULES = """
    numpy numpy.fft numpy.linalg numpy.ma numpy.polynomial numpy.random numpy.testing numpy.typing
    """.split()


def main(*, with_numpy: bool) -> None:
    """Serve the socket on standard input, until its other end is closed."""
    requests = socket.socket(fileno=0)
    for name in [*MODULES, *(NUMPY_MODULES if with_numpy else [])]:
        with contextlib.suppress(ImportError):
            __import__(name)
    # Without files, a module that is not loaded is one that there is not.
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter]
    sys.path.clear()
    limit_descriptors(MOST_OPEN)
    server = _Server(requests)
    gc.collect()
    # Pages of objects that no collection visits stay shared with the children.
    gc.freeze()
    confine("starting")
    requests.send(READY)
    server.run()


class _Server:
    def __init__(self, requests: socket.socket) -> None:
        self._requests, self._confinement = requests, Confinement("program")
        self._lives: dict[int, int] = {}
        """The descriptor of each child's life socket."""
        self._watched: dict[int, int] = {}
        """The other way around, until the child is killed."""
        self._woken, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._poll = select.poll()
        for watched in (requests.fileno(), self._woken):
            self._poll.register(watched, select.POLLIN)

    def run(self) -> None:
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            # Ends first: a descriptor that is free again may be given to the next process.
            for descriptor in ready:
                if descriptor in self._watched:
                    self._poll.unregister(descriptor)
                    os.kill(self._watched.pop(descriptor), signal.SIGKILL)
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._collect()
            if self._requests.fileno() in ready and not self._start():
                for pid in self._lives:
                    os.kill(pid, signal.SIGKILL)
                return

    def _start(self) -> bool:
        """Fork the process that a message asks for; False if there are no more messages."""
        message, descriptors, _, _ = socket.recv_fds(self._requests, MOST_REQUEST, N_DESCRIPTORS)
        if not message:
            return False
        try:
            if len(descriptors) == N_DESCRIPTORS:
                talk, life, folder = descriptors
                helper, pid = os.getpid(), os.fork()
                if pid == 0:
                    _child(json.loads(message), talk, folder, helper, self._confinement)
                descriptors = [talk, folder]
                self._lives[pid], self._watched[life] = life, pid
                self._poll.register(life, select.POLLIN)
        except OSError:
            # No more processes: a life that is closed without a status says so.
            pass
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _collect(self) -> None:
        """Tell how each child that has ended did."""
        while self._lives:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            life = self._lives.pop(pid)
            if self._watched.pop(life, None) is not None:
                self._poll.unregister(life)
            with contextlib.suppress(OSError):
                os.write(life, STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(life)


def _child(request: dict[str, Any], talk: int, folder: int, helper: int, confinement: Confinement) -> None:
    """All that the new process does; it never returns to the helper's loop."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(talk, 0)
        os.dup2(talk, 1)
        os.fchdir(folder)
        # Nothing of the helper's, nor of a sibling's, is open in a program.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        limit_resources(request["memory"], request["seconds"])
        confinement.enter()
        if os.getppid() == helper:
            os.write(1, BEGUN)
            sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape", closefd=False)
            sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
            status = play_role()
    finally:
        os._exit(status)
