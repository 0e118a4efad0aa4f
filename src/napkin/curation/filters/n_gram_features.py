"""Texts as hashed word n-grams: the columns of a sparse matrix, for a linear classifier (fastText, Joulin et al. 2016).

A token is a run of letters, digits and underscores in lower case, or one other character that is not white space.
Tokens and n-grams are hashed into a fixed number of columns (a power of two), so that no vocabulary is kept. A text has
each column once, however often its n-grams occur, and the length 1.
"""

import re
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

_TOKEN = re.compile(r"\w+|[^\w\s]")
# An odd number with bits in all places, by which the hash of each token that follows is distinguished.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)
MAX_CHARACTERS = 20_000
"""Of a text, that is read from its beginning."""


def columns_of(text: str, n_columns: int, max_n: int) -> NDArray[np.int64]:
    """The columns of a text's n-grams of 1 to `max_n` tokens, in ascending order."""
    tokens = _TOKEN.findall(text[:MAX_CHARACTERS].lower())
    # A checksum that is the same in every process.
    hashes = {token: zlib.crc32(token.encode("utf-8", "surrogatepass")) for token in set(tokens)}
    singles = np.array([hashes[token] for token in tokens], np.uint64)
    grams, found = singles, [_mixed(singles)]
    for n in range(2, max_n + 1):
        # Each round appends the token n - 1 places behind.
        grams = grams[:-1] * _MULTIPLIER + singles[n - 1 :]
        found.append(_mixed(grams))
    return np.unique(np.concatenate(found) & np.uint64(n_columns - 1)).astype(np.int64)


def feature_matrix(texts: Iterable[str], n_columns: int, max_n: int) -> "csr_matrix":
    """Rows of one or more texts, each of length 1 (0 without tokens), of shape [texts, n_columns]."""
    from scipy.sparse import csr_matrix

    rows = [columns_of(text, n_columns, max_n).astype(np.int32) for text in texts]
    ends = np.cumsum([0, *map(len, rows)])
    values = np.concatenate([np.full(len(row), 1 / max(1, len(row)) ** 0.5, np.float32) for row in rows])
    return csr_matrix((values, np.concatenate(rows), ends), shape=(len(rows), n_columns))


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers whose low bits depend on all bits of the given ones."""
    product = numbers * _MULTIPLIER
    product = (product ^ (product >> _SHIFT)) * _MULTIPLIER
    return product >> _SHIFT
