"""The keys of the hash tables of the compiled core: two random numbers of this process.

With a hash that is known beforehand, a text or a vocabulary can be made whose keys all begin their search at one slot,
so that time grows with the square of their number. No result depends on these numbers.
"""

import secrets

import numpy as np
from numpy.typing import NDArray

KEY = secrets.randbits(64)
# Odd, so that a product with it loses nothing.
MULTIPLIER = secrets.randbits(64) | 1


def set_hash_keys(state: NDArray[np.int64], key: int, multiplier: int) -> None:
    """Write the two numbers into two fields of a state."""
    unsigned = state.view(np.uint64)
    unsigned[key], unsigned[multiplier] = KEY, MULTIPLIER
