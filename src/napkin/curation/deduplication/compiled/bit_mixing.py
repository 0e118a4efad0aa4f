"""The mixing of 64 bits that signatures, bands and anchors share."""

from typing import Any

import numpy as np

from napkin.machine_code.compiled_function import jitted

_32, _29 = np.uint64(32), np.uint64(29)
_FIRST, _SECOND = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


@jitted
def mixed(x: Any) -> Any:
    """A bijection of 64 bits after which each bit depends on all: MurmurHash3's constants, with other shifts."""
    x = (x ^ (x >> _32)) * _FIRST
    x = (x ^ (x >> _29)) * _SECOND
    return x ^ (x >> _32)
