"""What is inside a tokenizer: its merges in order, its longest tokens, how a word is built up."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.renumbered import RenumberedBPETokenizer


class Merge(NamedTuple):
    """The ids of two tokens, and of the one that they become."""

    first: int
    second: int
    merged: int


def merges_of(tokenizer: Tokenizer) -> list[Merge]:
    """The merges in the order in which they apply. Raises NapkinError for a kind that has none."""
    if isinstance(tokenizer, RenumberedBPETokenizer):
        return [Merge(*ids) for ids in tokenizer.merge_ids()]
    if isinstance(tokenizer, BPETokenizer):
        return [Merge(first, second, 256 + i) for i, (first, second) in enumerate(tokenizer.merges)]
    raise _no_bpe(tokenizer)


def pattern_of(tokenizer: Tokenizer) -> str:
    """The pre-tokenization pattern of a BPE tokenizer. Raises NapkinError for another kind."""
    if isinstance(tokenizer, BPETokenizer | RenumberedBPETokenizer):
        return tokenizer.pattern
    raise _no_bpe(tokenizer)


def longest_tokens(tokenizer: Tokenizer, n: int) -> list[int]:
    """Ids of the `n` ordinary tokens of most bytes, longest first, of equally long ones the lowest id first."""
    special = set(tokenizer.special_tokens.values())
    ordinary = (i for i in range(tokenizer.vocab_size) if i not in special)
    return sorted(ordinary, key=lambda i: (-len(tokenizer.vocabulary[i]), i))[:n]


def build_up(tokenizer: BPETokenizer | RenumberedBPETokenizer, piece: str) -> Iterator[tuple[int | None, list[int]]]:
    """Yield how the ids of one pre-token arise: None and its bytes, then the number of each merge and the ids after it.

    A token that no merge makes and that the whole pre-token is comes at once, with None too.

    >>> list(build_up(BPETokenizer([(116, 104), (256, 101)]), "then"))
    [(None, [116, 104, 101, 110]), (0, [256, 101, 110]), (1, [257, 110])]
    """
    merges = merges_of(tokenizer)
    number = {(merge.first, merge.second): i for i, merge in enumerate(merges)}
    special = set(tokenizer.special_tokens.values())
    id_of_byte = {token[0]: i for i, token in enumerate(tokenizer.vocabulary) if len(token) == 1 and i not in special}
    ids = [id_of_byte[byte] for byte in piece.encode()]
    yield None, ids
    if isinstance(tokenizer, RenumberedBPETokenizer) and (whole := tokenizer.whole_token(piece)) is not None:
        yield None, [whole]
        return
    while found := [(number[pair], place) for place, pair in enumerate(pairwise(ids)) if pair in number]:
        first, place = min(found)
        ids = [*ids[:place], merges[first].merged, *ids[place + 2 :]]
        yield first, ids


def _no_bpe(tokenizer: Tokenizer) -> NapkinError:
    return NapkinError(f"a tokenizer of kind '{tokenizer.kind}' has no merges: use one of kind 'bpe'")
