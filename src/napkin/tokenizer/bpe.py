"""Byte-pair encoding (Sennrich et al. 2016) on bytes (Radford et al. 2019).

Text is split into pre-tokens. Each starts as its UTF-8 bytes; then adjacent pairs are merged, of all that can be the
one that comes first in the list of merges, until no adjacent pair can be merged.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, ClassVar
from unicodedata import is_normalized, normalize

from napkin.errors import NapkinError
from napkin.tokenizer.base import CompiledTokenizer, Tokenizer
from napkin.tokenizer.character_bpe import PieceCache, merge_symbols
from napkin.tokenizer.numba.dispatch import can_encode, should_encode_compiled
from napkin.tokenizer.pre_tokenization import PreTokenizer
from napkin.tokenizer.text_input import check_texts, checked_text_tokens, utf8
from napkin.tokenizer.unicode_tables.tables import DEFAULT_VERSION, UNNAMED_VERSION

if TYPE_CHECKING:
    import numpy

    from napkin.tokenizer.numba.encoding import Encoder


# Shorter texts, in characters, are never worth the compiled core.
_MIN_COMPILED_LENGTH = 2**10
_MAX_VOCABULARY_BYTES = 2**28


class BPETokenizer(CompiledTokenizer):
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
        self._ranks = {pair: 256 + i for i, pair in enumerate(self.merges)}
        self._ids_of = PieceCache(self._merged)

    def encode_utf8(
        self, data: bytes, ends: Sequence[int], *, threads: int = 1
    ) -> "tuple[numpy.ndarray, numpy.ndarray]":
        """Like `encode_documents`, for texts that follow one another in `data`, valid UTF-8, and end at `ends`."""
        if not self._encodes_compiled(len(data)):
            return super().encode_utf8(data, ends)
        return self._encoder.encode(data, ends, dtype=self.id_dtype, threads=threads)

    def _encode_ordinary(self, text: str) -> list[int]:
        if len(text) < _MIN_COMPILED_LENGTH:
            # Created when the first long text is encoded. For short texts alone it is not worth loading.
            encoder: Encoder | None = self.__dict__.get("_encoder")
            if encoder is not None:
                return encoder.encode_short(text.encode())
        elif self._encodes_compiled(len(text)):
            return self._encoder.encode(text.encode())[0].tolist()
        return list(chain.from_iterable(map(self._ids_of.__getitem__, self._pre_tokenizer.split(text))))

    def _merged(self, pre_token: str) -> tuple[int, ...]:
        # Ranks are those of the ids that merges make: rank 256 + i makes the id 256 + i.
        return tuple(merge_symbols(list(pre_token.encode()), self._ranks, range(256 + len(self.merges))))

    def _encode_compiled(self, texts: Sequence[str], threads: int) -> "tuple[numpy.ndarray, numpy.ndarray]":
        data = [utf8(text) for text in texts]
        ends = list(accumulate(map(len, data)))
        return self._encoder.encode(b"".join(data), ends, dtype=self.id_dtype, threads=threads)

    def _encodes_compiled(self, n_bytes: int) -> bool:
        return self._can_be_compiled and should_encode_compiled(n_bytes)

    @cached_property
    def _encoder(self) -> "Encoder":
        from napkin.tokenizer.numba.encoding import Encoder

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


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes, followed by the special tokens: no training, no unknown text, the longest sequences.

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


# The library that reads tokenizer.json has the tables of Unicode 9.0: combining characters and compositions that came
# later, up to 18.0, stay as and where they are. Hexadecimal code points, and ranges of them.
_NEWER = """
5c8-5c9 7fd 897-89f 8ca-8d3 9fe c3c d3b-d3c eba 1715 1abf-1af0 1df6-1dfa a82c 105c9 105d2 105da 105e4
10d24-10d27 10d69-10d6d 10eab-10eac 10ecb-10ecf 10ef0-10efb 10efd-10eff 10f46-10f50 10f82-10f85 11070 1133b
11383 11385 1138e 11391 113b8 113bb 113c2 113c5 113c7-113c9 113ce-113d0 1145e 11839-1183a 11930 11938
1193d-1193e 11943 119e0 11a34 11a47 11a99 11d42 11d44-11d45 11d97 11f41-11f42 1611e-16129 1612f 16d67-16d6a
16ff0-16ff1 1d127-1d128 1d250-1d252 1d25b-1d25c 1d25f 1d280-1d281 1e08f 1e130-1e136 1e2ae 1e2ec-1e2ef
1e4ec-1e4ef 1e5ee-1e5ef 1e6e3 1e6e6 1e6ee-1e6ef 1e6f5
"""


def normal_form_c(text: str) -> str:
    r"""The text in normal form C, as Hugging Face's `tokenizers` makes it and Qwen's tokenizers need it: a letter and
    its accent are one character where there is one. The normal form of a text looks the same.

    >>> normal_form_c("e\u0301") == "\u00e9"
    True
    """
    if text.isascii():
        return text
    if _IS_NEWER.search(text):
        return "".join(normalize("NFC", part) for part in _IS_NEWER.split(text))
    return text if is_normalized("NFC", text) else normalize("NFC", text)


def _character_class(ranges: str) -> str:
    ends = ([chr(int(end, 16)) for end in each.split("-")] for each in ranges.split())
    return "".join("-".join(pair) for pair in ends)


# With a group, split also returns what it splits at.
_IS_NEWER = re.compile(f"([{_character_class(_NEWER)}])")


NO_TOKEN = -1
"""Stands for the missing id of a byte without a token."""


class RemappedBPETokenizer(Tokenizer):
    """A BPETokenizer of `merges` and `pattern` whose ids are mapped to others: a vocabulary of another library.

    It may differ from a BPETokenizer's in five ways: bytes, merges and special tokens may have any ids; it may contain
    tokens that no merge makes; such a token may be used if it is a whole pre-token; text may be normalized first; bytes
    may have no token and are left out of texts, as other libraries do.

    In `merges` the bytes are 0 to 255 and merge i makes 256 + i, independent of `ids`. `ids` are those of the bytes,
    the merges, the `unmerged` tokens and the special tokens, in this order: a permutation of the numbers from 0 on, and
    -1 for bytes without a token.
    With `whole`, a pre-token that equals an `unmerged` token is encoded as it; otherwise those are only decoded. With
    `normalize`, text is brought into normal form C first (see `normal_form_c`), so that decoding gives that form.

    Raises NapkinError for ids that are not a permutation, for an unmerged token that is empty, a duplicate or made by a
    merge, and in the same cases as BPETokenizer.

    >>> ids = [*range(1, 257), 258, 257, 0]
    >>> tokenizer = RemappedBPETokenizer([(116, 104), (256, 101)], ["<s>"], ids=ids)
    >>> tokenizer.encode("<s>th", allowed_special="all"), tokenizer.encode("the")
    ([0, 258], [257])
    """

    kind: ClassVar[str] = BPETokenizer.kind

    def __init__(
        self,
        merges: Sequence[tuple[int, int]],
        special_tokens: Sequence[str] = (),
        pattern: str = "gpt2",
        *,
        ids: Sequence[int],
        unmerged: Sequence[bytes] = (),
        whole: bool = False,
        normalize: bool = False,
        text_tokens: Collection[str] = (),
        unicode_version: str | None = DEFAULT_VERSION,
    ) -> None:
        # With `whole`, text is split here to look up whole pre-tokens, and not again inside `_plain`.
        self._plain = BPETokenizer(merges, (), "whole" if whole else pattern, unicode_version=unicode_version)
        self.unicode_version = self._plain.unicode_version
        self.merges = self._plain.merges
        self.pattern = pattern
        self.unmerged = list(unmerged)
        self.whole = whole
        self.normalize = normalize
        super().__init__([*self._plain.vocabulary, *self.unmerged], special_tokens, pattern)
        self._ids = _checked_ids(ids, len(self.vocabulary))
        _check_unmerged(self.unmerged, self._plain.vocabulary)
        tokens = dict(zip(self._ids, self.vocabulary, strict=True))
        tokens.pop(NO_TOKEN, None)
        self.vocabulary = [tokens[i] for i in range(len(tokens))]
        self._drops_bytes = NO_TOKEN in self._ids
        self.special_tokens = {token: self._ids[i] for token, i in self.special_tokens.items()}
        n_merged = len(self._plain.vocabulary)
        self.text_tokens = checked_text_tokens(text_tokens, self.special_tokens)
        self._id_of_whole = dict(zip(self.unmerged, self._ids[n_merged:], strict=False))
        self._pre_tokenizer = PreTokenizer(pattern, self.unicode_version)

    def merge_ids(self) -> list[tuple[int, int, int]]:
        """The ids of the two tokens that each merge joins, and of the token that it makes, in order."""
        ids = self._ids
        return [(ids[first], ids[second], ids[256 + i]) for i, (first, second) in enumerate(self.merges)]

    def whole_token(self, pre_token: str) -> int | None:
        """The id of a pre-token that equals an unmerged token; None if it does not, or without `whole`."""
        return self._id_of_whole.get(pre_token.encode()) if self.whole else None

    def encode_batch(self, texts: Iterable[str], *, threads: int = 1) -> list[list[int]]:
        """Turn each text into a list of ids; special tokens in them are ordinary text."""
        if self.whole:
            return super().encode_batch(texts)
        texts = map(self._normal, check_texts(texts))
        return [self._mapped(ids) for ids in self._plain.encode_batch(texts, threads=threads)]

    def encode_documents(self, texts: Sequence[str], *, threads: int = 1) -> "tuple[numpy.ndarray, numpy.ndarray]":
        """The concatenated ids of all texts, and how many each text has."""
        if self.whole:
            return super().encode_documents(texts)
        return self._mapped_documents(*self._plain.encode_documents(list(map(self._normal, texts)), threads=threads))

    def encode_utf8(
        self, data: bytes, ends: Sequence[int], *, threads: int = 1
    ) -> "tuple[numpy.ndarray, numpy.ndarray]":
        """Like `encode_documents`, for texts that follow one another in `data`, valid UTF-8, and end at `ends`."""
        if self.whole or (self.normalize and not data.isascii()):
            return super().encode_utf8(data, ends, threads=threads)
        return self._mapped_documents(*self._plain.encode_utf8(data, ends, threads=threads))

    def encode_to_numpy(self, text: str, *, threads: int = 1) -> "numpy.ndarray":
        """Turn text into ids of shape [n_tokens]: uint16 if every id fits, otherwise uint32."""
        if self.whole:
            return super().encode_to_numpy(text)
        found = self._plain.encode_to_numpy(self._normal(text), threads=threads)
        return self._table[found[self._has_token[found]] if self._drops_bytes else found]

    def _mapped(self, ids: Iterable[int]) -> list[int]:
        mapped = list(map(self._ids.__getitem__, ids))
        return [i for i in mapped if i != NO_TOKEN] if self._drops_bytes else mapped

    def _mapped_documents(self, ids: "numpy.ndarray", counts: "numpy.ndarray") -> "tuple[numpy.ndarray, numpy.ndarray]":
        if not self._drops_bytes or (kept := self._has_token[ids]).all():
            return self._table[ids], counts
        import numpy

        kept_before = numpy.concatenate(([0], numpy.cumsum(kept)))
        ends = numpy.concatenate(([0], numpy.cumsum(counts)))
        return self._table[ids[kept]], numpy.diff(kept_before[ends]).astype(counts.dtype)

    @cached_property
    def _table(self) -> "numpy.ndarray":
        import numpy

        return numpy.array(self._ids).clip(0).astype(self.id_dtype)

    @cached_property
    def _has_token(self) -> "numpy.ndarray":
        import numpy

        return numpy.array(self._ids) != NO_TOKEN

    def _normal(self, text: str) -> str:
        return normal_form_c(text) if self.normalize else text

    def _encode_ordinary(self, text: str) -> list[int]:
        text = self._normal(text)
        if not self.whole:
            return self._mapped(self._plain.encode(text))
        ids: list[int] = []
        for pre_token in self._pre_tokenizer.split(text):
            found = self.whole_token(pre_token)
            if found is None:
                ids.extend(self._mapped(self._plain.encode(pre_token)))
            else:
                ids.append(found)
        return ids

    def _content(self) -> dict[str, Any]:
        return {
            **self._plain._content(),
            "pattern": self.pattern,
            "special_tokens": list(self.special_tokens),
            "ids": self._ids,
            "unmerged": [token.hex() for token in self.unmerged],
            "whole": self.whole,
            # Written only if set, so that other files keep their fingerprint.
            **({"normal_form": "NFC"} if self.normalize else {}),
            **({"text_tokens": sorted(self.text_tokens)} if self.text_tokens else {}),
        }


def _checked_ids(ids: Sequence[int], n_tokens: int) -> list[int]:
    if len(ids) != n_tokens:
        raise NapkinError(f"{len(ids)} ids are given for {n_tokens} tokens: give one id per token")
    n_tokens -= ids[:256].count(NO_TOKEN)
    seen = bytearray(n_tokens)
    for place, i in enumerate(ids):
        if i == NO_TOKEN and place < 256:
            continue
        if not 0 <= i < n_tokens:
            raise NapkinError(f"id {i} is outside 0 to {n_tokens - 1}, the ids of {n_tokens} tokens: leave no gap")
        if seen[i]:
            raise NapkinError(f"id {i} is given to two tokens: ids must be distinct")
        seen[i] = 1
    return list(ids)


def _check_unmerged(unmerged: Sequence[bytes], merged: Sequence[bytes]) -> None:
    seen = set(merged)
    for token in unmerged:
        if not token:
            raise NapkinError("an unmerged token is empty: it needs at least one byte")
        if token in seen:
            raise NapkinError(f"unmerged token {token!r} is also a byte, a merge or another unmerged token: remove it")
        seen.add(token)
