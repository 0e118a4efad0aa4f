"""What the rules of quality distinguish of a character, as bits of one byte per code point of Unicode."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from napkin.tokenizer.unicode_tables.tables import DEFAULT_VERSION, WHITE_SPACE, ranges

SPACE, LETTER, LOWER, SOLO, BULLET, TERMINAL, CLOSER, WATCHED = (1 << bit for bit in range(8))

TERMINALS = ".!?" + "‼‽⁇⁈⁉؟۔܀܁܂।॥၊။።፧፨᙮᠃᠉⸮。︒﹒﹖﹗！．？｡"
"""Characters that end a sentence: those of Unicode's property Sentence_Terminal in scripts of large corpora."""
CLOSERS = "\"')]}»”’›」』）】"
"""What may stand between the end of a sentence and the white space after it."""
BULLETS = "-*•‣▪▸►▶●○■□◦⁃"
"""What an item of a list begins with."""
SOLO_RANGES = (
    (0x3040, 0x30FF),
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9D),
    (0x20000, 0x3FFFF),
)
"""Hiragana, katakana and ideographs: each is a word, because nothing separates words there."""
# Where a compiled scan looks closer: ellipses, symbols, and a letter of each phrase of C4.
_WATCHED = ".#{…mMvVkK"


@cache
def character_classes() -> NDArray[np.uint8]:
    """The bits of every code point, of shape [1114112]; computed once per process."""
    classes = np.zeros(0x110000, np.uint8)
    for first, last, category in ranges(DEFAULT_VERSION):
        if category.startswith("L"):
            classes[first : last + 1] |= LETTER | (LOWER if category == "Ll" else 0)
    for first, last in SOLO_RANGES:
        classes[first : last + 1] |= SOLO
    for characters, bit in (
        (WHITE_SPACE, SPACE),
        (TERMINALS, TERMINAL),
        (CLOSERS, CLOSER),
        (BULLETS, BULLET),
        (_WATCHED, WATCHED),
    ):
        classes[[ord(each) for each in characters]] |= bit
    return classes
