"""Byte-pair encoding (Sennrich et al. 2016) on bytes (Radford et al. 2019).

Text is split into pre-tokens. Each starts as its UTF-8 bytes; then adjacent pairs are merged, of all that can be the
one that comes first in the list of merges, until no adjacent pair can be merged.

Byte-level tokens, one per byte of UTF-8: no training, no unknown text, the longest sequences.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.character_bpe import merge_symbols
from napkin.tokenizer.numba.dispatch import can_encode, should_encode_compiled
from napkin.tokenizer.pre_tokenization import PreTokenizer
from napkin.tokenizer.text_input import check_texts, utf8
from napkin.tokenizer.unicode_tables.tables import DEFAULT_VERSION, UNNAMED_VERSION

if TYPE_CHECKING:
    import numpy

    from napkin.tokenizer.numba.encoder import Encoder


_CACHED_PRE_TOKENS = 2**17
_CACHED_LENGTH = 256
# Shorter texts, in characters, are never worth the compiled core.
_MIN_COMPILED_LENGTH = 2**10
_MAX_VOCABULARY_BYTES = 2**28


class BPETokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes, id 256 + i is the result of `merges[i]`, the special tokens come last.

    A merge may join ids that later merges make, as in Llama 3: it applies as soon as both are there. `pattern` is the
    name of a pre-tokenization pattern or a regular expression (see pre_tokenization.py), `unicode_version` the one
    whose character classes it means; None is that of files that do not name one. Raises NapkinError for a merge of ids
    that do not exist or that are made of what it makes, a duplicate merge, tokens of more than 256 MiB in total, and a
    pattern that is not a regular expression.

    >>> tokenizer = BPETokenizer([(116, 104), (256, 101)], ["<|endoftext|>"])
    >>> tokenizer.encode("the"), tokenizer.vocabulary[257], tokenizer.special_tokens
    ([257], b'the', {'<|endoftext|>': 258})
    """

    kind: ClassVar[str] = "bpe"

    def __init__(
        self,
        merges: Sequence[tuple[int, int]],
        special_tokens: Sequence[str] = (),
        pattern: str = "gpt2",
        *,
        unicode_version: str | None = DEFAULT_VERSION,
    ) -> None:
        self._named_version = unicode_version
        self.unicode_version = unicode_version or UNNAMED_VERSION
        self.merges = [(first, second) for first, second in merges]
        self.pattern = pattern
        super().__init__(_ordinary_tokens(self.merges), special_tokens, pattern)
        self._pre_tokenizer = PreTokenizer(pattern, self.unicode_version)
        self._can_be_compiled = can_encode(self.vocab_size, pattern)
        self._ids_of = _Cache({pair: 256 + i for i, pair in enumerate(self.merges)})

    def encode_batch(self, texts: Iterable[str], *, threads: int = 1) -> list[list[int]]:
        """Turn each text into a list of ids; special tokens in them are ordinary text."""
        texts = list(check_texts(texts))
        if not self._encodes_compiled(sum(map(len, texts))):
            return [self.encode(text) for text in texts]
        joined, counts = self._encode_compiled(texts, threads)
        ids = joined.tolist()
        return [ids[start:end] for start, end in pairwise(accumulate(counts.tolist(), initial=0))]

    def encode_documents(self, texts: Sequence[str], *, threads: int = 1) -> "tuple[numpy.ndarray, numpy.ndarray]":
        """The concatenated ids of all texts, and how many each text has."""
        if not self._encodes_compiled(sum(map(len, texts))):
            return super().encode_documents(texts)
        return self._encode_compiled(texts, threads)

    def encode_utf8(
        self, data: bytes, ends: Sequence[int], *, threads: int = 1
    ) -> "tuple[numpy.ndarray, numpy.ndarray]":
        """Like `encode_documents`, for texts that follow one another in `data`, valid UTF-8, and end at `ends`."""
        if not self._encodes_compiled(len(data)):
            return super().encode_utf8(data, ends)
        return self._encoder.encode(data, ends, dtype=self.id_dtype, threads=threads)

    def encode_to_numpy(self, text: str, *, threads: int = 1) -> "numpy.ndarray":
        """Turn text into ids of shape [n_tokens]: uint16 if every id fits, otherwise uint32.

        A long text is encoded by up to `threads` threads; the ids do not depend on their number.
        """
        if not self._encodes_compiled(len(text)):
            return super().encode_to_numpy(text)
        ids, _ = self._encoder.encode(utf8(text), dtype=self.id_dtype, threads=threads)
        return ids

    def _encode_ordinary(self, text: str) -> list[int]:
        if len(text) >= _MIN_COMPILED_LENGTH and self._encodes_compiled(len(text)):
            return self._encoder.encode(text.encode())[0].tolist()
        return list(chain.from_iterable(map(self._ids_of.__getitem__, self._pre_tokenizer.split(text))))

    def _encode_compiled(self, texts: Sequence[str], threads: int) -> "tuple[numpy.ndarray, numpy.ndarray]":
        data = [utf8(text) for text in texts]
        ends = list(accumulate(map(len, data)))
        return self._encoder.encode(b"".join(data), ends, dtype=self.id_dtype, threads=threads)

    def _encodes_compiled(self, n_bytes: int) -> bool:
        return self._can_be_compiled and should_encode_compiled(n_bytes, self.pattern)

    @cached_property
    def _encoder(self) -> "Encoder":
        from napkin.tokenizer.numba.encoder import Encoder

        return Encoder(self.merges, self.pattern, unicode_version=self.unicode_version)

    def _content(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "pattern": self.pattern,
            **({"unicode": self._named_version} if self._named_version else {}),
            "special_tokens": list(self.special_tokens),
            "merges": [list(pair) for pair in self.merges],
        }


def _ordinary_tokens(merges: Sequence[tuple[int, int]]) -> list[bytes]:
    tokens = [bytes([i]) for i in range(256)] + [b""] * len(merges)
    seen: set[tuple[int, int]] = set()
    for number, (first, second) in enumerate(merges):
        if not (0 <= first < len(tokens) and 0 <= second < len(tokens)):
            raise NapkinError(
                f"merge {number} joins ids {first} and {second}: the ids of bytes and merges are 0 to {len(tokens) - 1}"
            )
        if (first, second) in seen:
            raise NapkinError(f"merge ({first}, {second}) is given twice: the second never applies, remove it")
        seen.add((first, second))
    size_bytes = 0
    for number in _parts_first(merges):
        first, second = merges[number]
        # A few dozen merges can double a token beyond all memory; no real text gives such merges.
        size_bytes += len(tokens[first]) + len(tokens[second])
        if size_bytes > _MAX_VOCABULARY_BYTES:
            raise NapkinError(f"the tokens up to merge {number} exceed {_MAX_VOCABULARY_BYTES} bytes: use fewer merges")
        tokens[256 + number] = tokens[first] + tokens[second]
    return tokens


def _parts_first(merges: Sequence[tuple[int, int]]) -> Iterator[int]:
    """The numbers of all merges, those that make the parts of a token before the one that makes it."""
    if all(max(pair) < 256 + number for number, pair in enumerate(merges)):
        yield from range(len(merges))
        return
    state = bytearray(len(merges))
    for number in range(len(merges)):
        waiting = [] if state[number] == _DONE else [number]
        while waiting:
            last = waiting[-1]
            missing = [part - 256 for part in merges[last] if part >= 256 and state[part - 256] != _DONE]
            if not missing:
                waiting.pop()
                if state[last] != _DONE:
                    state[last] = _DONE
                    yield last
                continue
            if state[last] == _WAITING or last in missing:
                raise NapkinError(
                    f"merge {last} joins ids {merges[last][0]} and {merges[last][1]}, one of which is made of "
                    f"{256 + last}, the id that it makes: remove it"
                )
            state[last] = _WAITING
            waiting += missing


_WAITING, _DONE = 1, 2


class _Cache(dict[str, tuple[int, ...]]):
    """Pre-token to ids, computed once and cached: few distinct pre-tokens make up most of a text."""

    def __init__(self, merges: dict[tuple[int, int], int]) -> None:
        self._merges = merges
        # Ranks are those of the ids that merges make: rank 256 + i makes the id 256 + i.
        self._made = range(256 + len(merges))

    def __missing__(self, pre_token: str) -> tuple[int, ...]:
        ids = tuple(merge_symbols(list(pre_token.encode()), self._merges, self._made))
        if len(pre_token) <= _CACHED_LENGTH:
            # Clearing it all adapts to a text whose words change; the frequent ones are soon back.
            if len(self) >= _CACHED_PRE_TOKENS:
                self.clear()
            self[pre_token] = ids
        return ids


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes, followed by the special tokens.

    >>> ByteTokenizer().encode("né")
    [110, 195, 169]
    """

    kind: ClassVar[str] = "bytes"

    def __init__(self, special_tokens: Sequence[str] = ()) -> None:
        super().__init__([bytes([i]) for i in range(256)], special_tokens)

    def _encode_ordinary(self, text: str) -> list[int]:
        return list(utf8(text))

    def _content(self) -> dict[str, Any]:
        return {"kind": self.kind, "special_tokens": list(self.special_tokens)}
