"""Looking into tokenizers: merges in order, longest tokens, the merges that build a word; comparing several."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import BPETokenizer, RemappedBPETokenizer
from napkin.tokenizer.text_input import utf8
from napkin.tokenizer.word_level import UnknownRate, unknown_rate


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
    ids = [id_of_byte[byte] for byte in piece.encode() if byte in id_of_byte]
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


SECONDS_OF_TIMING = 0.1


@dataclass(frozen=True)
class EncodedText:
    """A text as a tokenizer encodes it."""

    name: str
    tokenizer: Tokenizer
    ids: list[int]
    seconds: float
    """Seconds of the fastest of several times."""
    text_bytes: int
    lost: UnknownRate
    """The part of the text that is lost as unknown words; with a loss, bytes per token cannot be compared with those of
    others."""

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / len(self.ids)

    @property
    def bytes_per_second(self) -> float:
        return self.text_bytes / self.seconds

    def as_values(self, excerpt: str = "") -> dict[str, Any]:
        """The figures for programs, with the tokens of an excerpt."""
        return {
            "name": self.name,
            "kind": self.tokenizer.kind,
            "vocab_size": self.tokenizer.vocab_size,
            "tokens": len(self.ids),
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_second": self.bytes_per_second,
            "unknown_tokens": self.lost.tokens,
            "lost_bytes": self.lost.bytes,
            "first_tokens": [printable(self.tokenizer.vocabulary[i]) for i in self.tokenizer.encode(excerpt)],
        }


def compare_tokenizers(
    tokenizers: Sequence[tuple[str, Tokenizer]], text: str
) -> tuple[list[EncodedText], dict[str, str]]:
    """Encode a text with each of the named tokenizers; for tokenizers that cannot encode it, the reason, by name."""
    results: list[EncodedText] = []
    refused: dict[str, str] = {}
    text_bytes = len(utf8(text))
    for name, tokenizer in tokenizers:
        try:
            ids, seconds = _timed(tokenizer, text)
        except NapkinError as error:
            refused[name] = str(error)
            continue
        lost = unknown_rate(tokenizer, Counter(ids), text_bytes)
        results.append(EncodedText(name, tokenizer, ids, seconds, text_bytes, lost))
    return results, refused


def _timed(tokenizer: Tokenizer, text: str) -> tuple[list[int], float]:
    best, begin = float("inf"), time.perf_counter()
    while True:
        start = time.perf_counter()
        ids = tokenizer.encode(text)
        end = time.perf_counter()
        best = min(best, end - start)
        if end - begin > SECONDS_OF_TIMING:
            return ids, best
