"""What a word is: the table by which the compiled loops split text.

A word is a run of letters, digits and combining marks, without regard to case (for Latin, Greek, Cyrillic and
Armenian letters). Characters of scripts that are written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese)
are words of their own. Everything else separates words: punctuation, symbols and white space do not count.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from napkin.tokenizer.numba.character_classes import KIND, LETTER, MARK, NUMBER, character_classes

SEPARATOR, PART_OF_WORD, WORD = range(3)
_UNICODE = "16.0"
_CASED = ((0x0041, 0x0590), (0x1E00, 0x2000))
# Code points, the last excluded.
_WITHOUT_SPACES = (
    (0x0E00, 0x0F00),
    (0x1000, 0x10A0),
    (0x1780, 0x1800),
    (0x2E80, 0x2FE0),
    (0x3005, 0x3008),
    (0x3040, 0x3100),
    (0x31F0, 0x3200),
    (0x3400, 0x4DC0),
    (0x4E00, 0xA000),
    (0xF900, 0xFB00),
    (0xFF66, 0xFFA0),
    (0x20000, 0x40000),
)


@cache
def word_table() -> NDArray[np.uint32]:
    """For each code point 4 · (the code point in lower case) + its kind, of shape [1114112]."""
    classes = character_classes(_UNICODE)
    kind = classes & KIND
    in_words = (kind == LETTER) | (kind == NUMBER) | ((classes & MARK) != 0)
    kinds = np.where(in_words, PART_OF_WORD, SEPARATOR).astype(np.uint32)
    for first, stop in _WITHOUT_SPACES:
        kinds[first:stop][in_words[first:stop]] = WORD
    lower = np.arange(len(classes), dtype=np.uint32)
    for first, stop in _CASED:
        for code in range(first, stop):
            small = chr(code).lower()
            if len(small) == 1:
                lower[code] = ord(small)
    return lower << np.uint32(2) | kinds
