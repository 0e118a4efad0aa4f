"""SIGBUS as a one-line error: pages of a mapped file that was truncated, or whose disk is gone, cannot be read.

The size of a token file is checked right before each read. If it is truncated in the microseconds after that, the
kernel raises SIGBUS during an instruction that cannot be completed. Python's own handlers run only after the
instruction, so this one is called by C: it prints what happened and exits.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def leaving_on_lost_pages(last_words: Callable[[], str]) -> Iterator[None]:
    """While the block runs, answer SIGBUS by writing a line to standard error and ending the process with status 2.

    `last_words` returns the line, and may also save a checkpoint. In threads other than the main one the line is a
    generic one.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGBUS"):
        yield
        return

    def leave(_: int) -> None:
        line = "a mapped file was shortened, or its disk has gone: put it back and continue with `napkin resume`"
        try:
            if threading.current_thread() is threading.main_thread():
                line = last_words()
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
