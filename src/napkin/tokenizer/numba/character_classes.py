"""The character class of each code point, as pre-tokenization patterns see it: a table of 1,114,112 bytes.

The classes are those of the tables in unicode_tables, which the plain patterns use too.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from napkin.tokenizer.unicode_tables.tables import WHITE_SPACE, ranges

# The two low bits are the kind of character: \p{L}, \p{N}, \s, or none of these.
OTHER, LETTER, NUMBER, SPACE = range(4)
KIND = 3
# Flags for patterns that distinguish case: \p{Lu} or \p{Lt}, \p{Ll}, \p{M}.
UPPER, LOWER, MARK = 4, 8, 16

_BY_CATEGORY = {"L": LETTER, "N": NUMBER, "M": MARK}
_BY_CASE = {"Lu": LETTER | UPPER, "Lt": LETTER | UPPER, "Ll": LETTER | LOWER}


@cache
def character_classes(unicode_version: str) -> NDArray[np.uint8]:
    """The class of every code point, of shape [1114112]; computed once per process and version of Unicode."""
    classes = np.zeros(0x110000, np.uint8)
    for first, last, category in ranges(unicode_version):
        classes[first : last + 1] = _BY_CASE.get(category) or _BY_CATEGORY.get(category[0], OTHER)
    classes[list(map(ord, WHITE_SPACE))] = SPACE
    return classes
