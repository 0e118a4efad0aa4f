"""Let the C library keep memory that is freed, for the next tensor of its size.

glibc gives large blocks back to the system and takes them anew each time; every page is then cleared and mapped again,
which for the tensors of a training step takes longer than many of the operators that fill them. The bytes of tensors,
which plan and meter speak of, are the same.
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
    """Ask glibc, once per process, to serve all blocks from its heap and not to shrink it; whether it agreed.

    Elsewhere (another C library, another system) nothing is changed.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        return bool(library.mallopt(_M_MMAP_MAX, 0)) and bool(library.mallopt(_M_TRIM_THRESHOLD, _NEVER))
    return False
