"""SIGBUS as a clear line: the pages of a mapped file that was shortened, or whose disk has gone, cannot be read.

The size of a token file is looked at right before each reading; what is lost within the microseconds between is told
by the kernel with a signal that comes in the middle of an instruction, to which there is no return. Python's own
handlers would be asked only after it. So C calls this one, which says what happened and leaves.
"""

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

    `last_words` makes the line, and may do more: it runs on top of the instruction that failed. In threads other than
    the main one the line is a plain one.
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
