"""Inspecting a tokenizer: its merges in order, its longest tokens, the merges that build a word.

Tokens as printable text: no invisible characters, nothing that a terminal would interpret.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.remapped_bpe import RemappedBPETokenizer


class Merge(NamedTuple):
    """The ids of two tokens, and of the token that they merge into."""

    first: int
    second: int
    merged: int


def merges_of(tokenizer: Tokenizer) -> list[Merge]:
    """The merges in the order in which they apply. Raises NapkinError for a kind without merges."""
    if isinstance(tokenizer, RemappedBPETokenizer):
        return [Merge(*ids) for ids in tokenizer.merge_ids()]
    if isinstance(tokenizer, BPETokenizer):
        return [Merge(first, second, 256 + i) for i, (first, second) in enumerate(tokenizer.merges)]
    raise _not_bpe(tokenizer)


def pattern_of(tokenizer: Tokenizer) -> str:
    """The pre-tokenization pattern of a BPE tokenizer. Raises NapkinError for another kind."""
    if isinstance(tokenizer, BPETokenizer | RemappedBPETokenizer):
        return tokenizer.pattern
    raise _not_bpe(tokenizer)


def longest_tokens(tokenizer: Tokenizer, n: int) -> list[int]:
    """Ids of the `n` ordinary tokens with the most bytes, longest first; equally long ones by id."""
    special = set(tokenizer.special_tokens.values())
    ordinary = (i for i in range(tokenizer.vocab_size) if i not in special)
    return sorted(ordinary, key=lambda i: (-len(tokenizer.vocabulary[i]), i))[:n]


def merge_steps(tokenizer: BPETokenizer | RemappedBPETokenizer, piece: str) -> Iterator[tuple[int | None, list[int]]]:
    """Yield how one pre-token is encoded: None and the ids of its bytes, then each merge's number and the ids after it.

    If the whole pre-token is a token that no merge makes, the second step is that token, also with None.

    >>> list(merge_steps(BPETokenizer([(116, 104), (256, 101)]), "then"))
    [(None, [116, 104, 101, 110]), (0, [256, 101, 110]), (1, [257, 110])]
    """
    merges = merges_of(tokenizer)
    number = {(merge.first, merge.second): i for i, merge in enumerate(merges)}
    special = set(tokenizer.special_tokens.values())
    id_of_byte = {token[0]: i for i, token in enumerate(tokenizer.vocabulary) if len(token) == 1 and i not in special}
    ids = [id_of_byte[byte] for byte in piece.encode()]
    yield None, ids
    if isinstance(tokenizer, RemappedBPETokenizer) and (whole := tokenizer.whole_token(piece)) is not None:
        yield None, [whole]
        return
    while found := [(number[pair], place) for place, pair in enumerate(pairwise(ids)) if pair in number]:
        first, place = min(found)
        ids = [*ids[:place], merges[first].merged, *ids[place + 2 :]]
        yield first, ids


def _not_bpe(tokenizer: Tokenizer) -> NapkinError:
    return NapkinError(f"a tokenizer of kind '{tokenizer.kind}' has no merges: use one of kind 'bpe'")


_SYMBOLS = {"\n": "↵", "\t": "→", "\r": "␍"}


def printable(token: bytes) -> str:
    r"""Show a token: line ends and tabs as symbols, invalid UTF-8 and unprintable characters as escapes.

    >>> printable(b" the\n"), printable("é".encode()[:1]), printable(b"\x1b[31m"), printable("\u202e".encode())
    (' the↵', '\\xc3', '\\x1b[31m', '\\u202e')
    """
    text = token.decode("utf-8", errors="backslashreplace")
    return "".join(each if each.isprintable() else _SYMBOLS.get(each) or _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
