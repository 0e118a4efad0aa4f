"""glibc's malloc: keeping freed memory for the next tensor of the same size, or giving it back to the system.

By default glibc returns large blocks to the system and maps them again each time; then every page is zeroed and faulted
in again, which for the tensors of a training step takes longer than many of the operators that fill them. The bytes of
tensors, which plan and meter report, do not change.
"""

import contextlib
import ctypes
import functools
import platform

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Make glibc, once per process, serve all blocks from its heap and never shrink it; True if it succeeded.

    With another C library, nothing is changed.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        return bool(library.mallopt(_M_MMAP_MAX, 0)) and bool(library.mallopt(_M_TRIM_THRESHOLD, _NEVER))
    return False


def return_freed_memory() -> None:
    """Give back to the system what glibc holds and nothing uses: free pages between blocks, in the heap of each thread.

    It takes milliseconds. With another C library, nothing is done.
    """
    if platform.libc_ver()[0] == "glibc":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
