"""What the classifier sees of a text: its letters in lower case, as code points, with one zero between words.

A word is a run of letters and marks (combining vowels and tones); digits, punctuation and symbols only separate words.
Canonically equal texts are the same: they are composed (NFC) first.
"""

from functools import cache
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from napkin.tokenizer.numba.character_classes import KIND, LETTER, MARK, character_classes

_UNICODE = "16.0"
"""The version of Unicode whose letters are known, whatever Python's own."""


def lowered_code_points(text: str) -> NDArray[np.uint32]:
    """The code points of the composed text in lower case: all of them, uint32 [n]."""
    if not text.isascii():
        text = normalize("NFC", text)
    return np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), np.uint32)


def words(text: str) -> list[str]:
    """The words of a text in lower case: what the compiled functions see too."""
    is_letter = letter_table()
    points = lowered_code_points(text)
    separated = np.where(is_letter[points] == 1, points, np.uint32(ord(" ")))
    return separated.astype("<u4").tobytes().decode("utf-32-le").split(" ") if len(points) else []


@cache
def letter_table() -> NDArray[np.uint8]:
    """1 for each code point that belongs to a word, else 0: uint8 [1114112]."""
    classes = character_classes(_UNICODE)
    return (((classes & KIND) == LETTER) | ((classes & MARK) > 0)).astype(np.uint8)
