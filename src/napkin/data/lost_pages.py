"""SIGBUS as a one-line error: pages of a mapped file that was truncated, or whose disk is gone, cannot be read.

Token files and checkpoints are mapped. While a run trains, the size of a token file is checked right before each read;
if it is truncated in the microseconds after that, or where nothing is checked, the kernel raises SIGBUS during an
instruction that cannot be completed. Python's own handlers run only after the instruction, so this one is called by C:
it prints what happened and exits.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def what_was_lost() -> str:
    """The message of a process that has nothing to save."""
    files = " or ".join(f"'{path}'" for path in _shortened_files()) or "a mapped file"
    return f"{files} was shortened, or its disk has gone, while it was read: put it back and try again"


def _shortened_files() -> list[str]:
    """The mapped files that are shorter than their mapping; none where the system does not list them."""
    shortened: dict[str, None] = {}
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            addresses, _, offset, _, _, *path = line.rstrip("\n").split(maxsplit=5)
            # The last segment of a library is longer than its file.
            if not path or not path[0].startswith("/") or ".so" in path[0]:
                continue
            first, last = (int(address, 16) for address in addresses.split("-"))
            with contextlib.suppress(OSError):
                # A mapping extends to the end of the file's last page.
                if int(offset, 16) + last - first >= os.stat(path[0]).st_size + mmap.PAGESIZE:
                    shortened[path[0]] = None
    return list(shortened)


@contextmanager
def leaving_on_lost_pages(last_words: Callable[[], str] = what_was_lost) -> Iterator[None]:
    """While the block runs, answer SIGBUS by writing a line to standard error and ending the process with status 2.

    `last_words` returns the line, and may also save a checkpoint. In threads other than the main one the line is
    `what_was_lost`.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGBUS"):
        yield
        return

    def leave(_: int) -> None:
        line = "a mapped file was shortened, or its disk has gone: put it back and try again"
        try:
            is_main = threading.current_thread() is threading.main_thread()
            line = last_words() if is_main else what_was_lost()
        except BaseException as error:
            line = f"{line} ({error})"
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os.write(2, f"napkin: {' '.join(line.split())}\n".encode())
            os._exit(2)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(leave)
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    previous = set_handler(signal.SIGBUS, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        set_handler(signal.SIGBUS, previous)
