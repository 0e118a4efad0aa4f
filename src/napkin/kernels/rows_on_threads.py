"""Compiled kernels on torch's number of threads, each with some of the rows and a buffer of its own."""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch

_SMALLEST_SHARE = 2**18
"""Numbers of a thread's share from which it is worth waking: that takes some 40 microseconds, as long as computing some
200,000 numbers."""

_buffers = threading.local()


def on_threads(compute: Callable[[int, int, int], object], n_rows: int, n_columns: int, buffer_size: int) -> None:
    """Call compute(start, stop, address of a buffer) for all of n_rows, divided among threads.

    A buffer holds `buffer_size` float32, which are what the last call left. Rows have n_columns numbers, from which
    it follows how many threads are worth it.
    """
    n = min(torch.get_num_threads(), n_rows, max(n_rows * n_columns // _SMALLEST_SHARE, 1))
    if n == 1:
        compute(0, n_rows, _buffer(buffer_size))
        return
    ends = [n_rows * part // n for part in range(n + 1)]

    def part(start: int, stop: int) -> None:
        compute(start, stop, _buffer(buffer_size))

    others = [worker_threads(n).submit(part, *bounds) for bounds in pairwise(ends[1:])]
    part(*ends[:2])
    for other in others:
        other.result()


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
