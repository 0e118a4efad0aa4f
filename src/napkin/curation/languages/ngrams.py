"""The features of a text: its character n-grams, each hashed to a row of the weights. The plain form.

A word of code points c1 … cm is read as `space c1 … cm space`. Its n-grams of 1 to LONGEST_NGRAM characters, but for
the spaces alone, and the word as a whole if it is longer than that, each give one row: the hash starts at SEED, and
each character c makes (hash xor c) · FACTOR of it, modulo 2^64; the row is its highest bits. Words of more than
LONGEST_WORD letters, as scripts without spaces have them, are cut into pieces.
"""

from collections.abc import Iterator

from napkin.curation.languages.letters import words

LONGEST_NGRAM = 4
LONGEST_WORD = 64
SEED = 0x9E3779B97F4A7C15
FACTOR = 0xD6E8FEB86659FD93
"""Odd, with bits set all over: the highest bits of the product depend on all bits of the hash."""
SPACE = 0x20


def ngram_rows(text: str, row_bits: int) -> Iterator[int]:
    """The rows, below 2^row_bits, of all n-grams of a text, in order; one that occurs twice comes twice."""
    for word in words(text):
        for start in range(0, len(word), LONGEST_WORD):
            yield from _rows_of_word(word[start : start + LONGEST_WORD], 64 - row_bits)


def _rows_of_word(word: str, shift: int) -> Iterator[int]:
    spelling = [SPACE, *map(ord, word), SPACE]
    for start in range(len(spelling)):
        end = len(spelling) if start == 0 else min(start + LONGEST_NGRAM, len(spelling))
        hashed = SEED
        for position in range(start, end):
            hashed = (hashed ^ spelling[position]) * FACTOR % 2**64
            length = position + 1 - start
            is_space = length == 1 and spelling[position] == SPACE
            if (length <= LONGEST_NGRAM or position + 1 == len(spelling)) and not is_space:
                yield hashed >> shift
