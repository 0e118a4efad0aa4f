"""Compiled loops on several threads, each with some of the rows and a buffer of its own.

The threads are those of torch's own operators, an OpenMP team of GNU's library, where torch is built with it: between
two operators they wait for a moment without sleeping, so that a loop begins on all of them within some microseconds.
Other threads would compete with them for the processor. Elsewhere, and in a process that was forked, which has no such
threads, they are Python's.
"""

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from napkin.machine_code.compiled_function import CompiledFunction

_SMALLEST_SHARE = 2**15
"""Numbers of a thread's share from which it is worth having: a team begins within some 5 microseconds, as long as
computing some 25,000 numbers."""
_SMALLEST_SHARE_OF_PYTHON = 2**18
"""The smallest share that is worth a Python thread, which takes some 40 microseconds to wake."""
_LINE = 16
"""float32 of a line of the processor's cache, which two threads should not both write."""

_process = os.getpid()
_buffers = threading.local()


def on_threads(
    kernel: "CompiledFunction",
    arguments: Callable[[int, int, int], tuple[int, ...]],
    n_rows: int,
    n_columns: int,
    buffer_size: int,
) -> None:
    """Call kernel(*arguments(start, stop, address of a buffer)) for all of n_rows, divided among threads.

    A buffer holds `buffer_size` float32, which are what the last call left. Rows have n_columns numbers, from which
    it follows how many threads are worth it.
    """
    n_threads = torch.get_num_threads()
    team = _team() if n_threads > 1 and os.getpid() == _process else None
    smallest = _SMALLEST_SHARE_OF_PYTHON if team is None else _SMALLEST_SHARE
    n = min(n_threads, n_rows, max(n_rows * n_columns // smallest, 1))
    if n == 1:
        kernel(*arguments(0, n_rows, _buffer(buffer_size)))
        return
    size = (buffer_size // _LINE + 2) * _LINE
    first = _buffer(n * size)
    ends = [n_rows * part // n for part in range(n + 1)]
    parts = [arguments(start, stop, first + 4 * size * part) for part, (start, stop) in enumerate(pairwise(ends))]
    if team is not None:
        team.run(kernel, parts, n_threads)
        return
    others = [worker_threads(n).submit(kernel, *part) for part in parts[1:]]
    kernel(*parts[0])
    for other in others:
        other.result()


class _Team(NamedTuple):
    """GNU's OpenMP library, as torch has loaded it."""

    parallel: Callable[..., None]
    thread_number: int
    n_threads: int

    def run(self, kernel: "CompiledFunction", parts: list[tuple[int, ...]], n_threads: int) -> None:
        """Make the calls, on a team as large as that of torch's operators: it would be made anew for another size."""
        given = [self.thread_number, self.n_threads, len(parts)]
        for part in parts:
            given += part
        self.parallel(kernel.parts_address, (ctypes.c_int64 * len(given))(*given), n_threads, 0)


@functools.cache
def _team() -> _Team | None:
    try:
        library = ctypes.CDLL(torch._C.__file__)
        parallel, *asked = (
            getattr(library, name) for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        )
    except (OSError, AttributeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return _Team(parallel, *(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in asked))


def worker_threads(n: int) -> ThreadPoolExecutor:
    """Threads of this process, n at most: those of a process that forked it are not there."""
    return _pool(os.getpid(), n)


@functools.cache
def _pool(process: int, n: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n)


def _buffer(size: int) -> int:
    held = getattr(_buffers, "held", None)
    if held is None or held.size < size:
        held = _buffers.held = np.empty(size, np.float32)
    return held.ctypes.data
