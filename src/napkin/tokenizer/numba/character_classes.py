"""The character class of each code point, as pre-tokenization patterns see it: a table of 1,114,112 bytes.

The classes are those of the `regex` library, which the plain patterns use.
"""

from functools import cache

import numpy as np
import regex
from numpy.typing import NDArray

# The two low bits are the kind of character: \p{L}, \p{N}, \s, or none of these.
OTHER, LETTER, NUMBER, SPACE = range(4)
KIND = 3
# Flags for patterns that distinguish case: \p{Lu} or \p{Lt}, \p{Ll}, \p{M}.
UPPER, LOWER, MARK = 4, 8, 16

_PATTERNS = {
    r"\p{L}++": LETTER,
    r"\p{N}++": NUMBER,
    r"\s++": SPACE,
    r"[\p{Lu}\p{Lt}]++": LETTER | UPPER,
    r"\p{Ll}++": LETTER | LOWER,
    r"\p{M}++": MARK,
}


@cache
def character_classes() -> NDArray[np.uint8]:
    """The class of every code point, of shape [1114112]; computed once per process."""
    everything = "".join(map(chr, range(0x110000)))
    classes = np.zeros(0x110000, np.uint8)
    for pattern, value in _PATTERNS.items():
        for match in regex.finditer(pattern, everything):
            classes[match.start() : match.end()] = value
    return classes
