"""The interface of all tokenizers.

A tokenizer is a list of byte strings, one per id, and a way to split text into them. Ordinary tokens come first,
special tokens last. decode(encode(text)) == text, except for words that a word vocabulary does not contain.
"""

import hashlib
import json
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, SupportsIndex

from napkin.errors import NapkinError
from napkin.files import StrPath, atomic_write_text
from napkin.tokenizer.text_input import SPLITTABLE_PATTERNS, check_special_tokens, check_texts, split_at, utf8

if TYPE_CHECKING:
    import numpy

FORMAT = "napkin-tokenizer"
VERSION = 1


class Tokenizer(ABC):
    """Base class of all tokenizers: a subclass adds how ordinary text is encoded and what its file contains.

    `vocabulary[id]` is the byte string of an id; `special_tokens` maps the text of each special token to its id, and
    `text_tokens` are those of them that mark no boundary, such as `<think>`, which the assistant of a conversation may
    say. `unknown_id` is the id of everything that the vocabulary lacks, None if any text can be encoded without loss.
    `strips_space` tells whether `decode` leaves out a space at the beginning, which `encode` puts there.
    `is_splittable` tells whether a text that is split where `find_split` says can be encoded part by part, with the
    same ids.
    """

    kind: ClassVar[str]
    vocabulary: list[bytes]
    special_tokens: dict[str, int]
    text_tokens: frozenset[str] = frozenset()
    unknown_id: int | None = None
    strips_space: bool = False
    is_splittable: bool

    def __init__(self, ordinary: Sequence[bytes], special_tokens: Sequence[str], pattern: str | None = None) -> None:
        check_special_tokens(special_tokens)
        self.special_tokens = {token: len(ordinary) + i for i, token in enumerate(special_tokens)}
        self.vocabulary = [*ordinary, *(utf8(token) for token in special_tokens)]
        self.is_splittable = pattern is None or pattern in SPLITTABLE_PATTERNS

    @property
    def vocab_size(self) -> int:
        """Number of ids, including those of special tokens."""
        return len(self.vocabulary)

    def encode(
        self, text: str, *, allowed_special: frozenset[str] | set[str] | Literal["all"] = frozenset()
    ) -> list[int]:
        """Turn text into ids.

        The text of a special token is encoded as ordinary text unless `allowed_special` contains it, so a document
        cannot inject a boundary. Raises NapkinError for a lone surrogate (the message gives its position), for a
        character that the vocabulary lacks, and for an allowed token that is not special.
        """
        utf8(text)
        if not allowed_special:
            return self._encode_ordinary(text)
        allowed = self.special_tokens.keys() if allowed_special == "all" else allowed_special
        if unknown := sorted(allowed - self.special_tokens.keys()):
            known = ", ".join(map(repr, self.special_tokens)) or "none"
            raise NapkinError(f"{unknown[0]!r} is not a special token of this tokenizer: it has {known}")
        return self.encode_parts(split_at(text, allowed))

    def encode_parts(self, parts: Sequence[str]) -> list[int]:
        """The ids of a text in parts: ordinary, special, ordinary, ... Special tokens in ordinary parts are text."""
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self.special_tokens[part])
            else:
                ids.extend(self._encode_ordinary(part))
        return ids

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Turn each text into a list of ids; special tokens in them are ordinary text."""
        return [self.encode(text) for text in check_texts(texts)]

    def encode_documents(self, texts: Sequence[str], *, threads: int = 1) -> "tuple[numpy.ndarray, numpy.ndarray]":
        """The concatenated ids of all texts, of shape [n_tokens], and how many each text has, of shape [n_texts].

        Tokenizers with compiled encoding use up to `threads` threads; the ids do not depend on their number.
        """
        import numpy

        encoded = [self.encode_to_numpy(text) for text in texts]
        counts = numpy.array([len(ids) for ids in encoded], numpy.int64)
        return numpy.concatenate([numpy.empty(0, self.id_dtype), *encoded]), counts

    def encode_utf8(
        self, data: bytes, ends: Sequence[int], *, threads: int = 1
    ) -> "tuple[numpy.ndarray, numpy.ndarray]":
        """Like `encode_documents`, for texts that follow one another in `data`, valid UTF-8, and end at `ends`."""
        starts = [0, *ends[:-1]]
        texts = [data[start:end].decode() for start, end in zip(starts, ends, strict=True)] if ends else []
        return self.encode_documents(texts, threads=threads)

    def encode_iterable(
        self, texts: Iterable[str], *, allowed_special: frozenset[str] | set[str] | Literal["all"] = frozenset()
    ) -> Iterator[int]:
        """Yield the ids of one text after another; only one text is in memory at a time.

        Nothing is inserted between texts, and no token spans two texts. `allowed_special` is that of `encode`.
        """
        for text in check_texts(texts):
            yield from self.encode(text, allowed_special=allowed_special)

    def encode_to_numpy(self, text: str) -> "numpy.ndarray":
        """Turn text into ids of shape [n_tokens]: uint16 if every id fits, otherwise uint32."""
        import numpy

        return numpy.array(self.encode(text), self.id_dtype)

    @property
    def id_dtype(self) -> Literal["uint16", "uint32"]:
        """The smallest dtype that every id fits in."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Turn ids into text. Bytes that are not valid UTF-8, such as a part of a character, become U+FFFD.

        Raises NapkinError for an id outside the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[SupportsIndex]) -> bytes:
        """Turn ids into their bytes: lossless where `decode` would replace a part of a character."""
        numbers = [operator.index(i) for i in ids]
        # A negative index would silently count from the end of the vocabulary.
        if numbers and (min(numbers) < 0 or max(numbers) >= self.vocab_size):
            wrong = next(i for i in numbers if not 0 <= i < self.vocab_size)
            raise NapkinError(
                f"token id {wrong} is outside 0 to {self.vocab_size - 1}, the ids of this vocabulary: "
                "decode with the tokenizer that made them"
            )
        return b"".join(map(self.vocabulary.__getitem__, numbers))

    def compression_ratio(self, text: str) -> float:
        """UTF-8 bytes of `text` per token; 1.0 for byte tokens. Raises NapkinError for the empty text."""
        if not text:
            raise NapkinError("the empty text has no compression ratio: give at least one character")
        return len(utf8(text)) / len(self.encode(text))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal of everything that determines the ids; equal for equal tokenizers only."""
        canonical = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The contents of the tokenizer's file, as plain JSON values."""
        return {"format": FORMAT, "version": VERSION, **self._content(), "fingerprint": self.fingerprint}

    def save(self, path: StrPath, *, overwrite: bool = False) -> None:
        """Write the tokenizer to one JSON file, atomically.

        A file of the same tokenizer is left as it is. Raises NapkinError if another file exists and `overwrite` is not
        set, or if it cannot be written.
        """
        atomic_write_text(path, _layout(self.to_dict()), overwrite=overwrite)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size}, fingerprint={self.fingerprint[:12]!r})"

    @abstractmethod
    def _encode_ordinary(self, text: str) -> list[int]:
        """Encode text without special tokens and without lone surrogates."""

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """Kind, parameters and special tokens: what the file contains and the fingerprint covers."""


def _layout(document: dict[str, Any]) -> str:
    # JSON with one line per key, and one line per list item, so that a diff shows which merge changed.
    return "{\n" + ",\n".join(f"{_json(key)}: {_value(value)}" for key, value in document.items()) + "\n}\n"


def _value(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return _json(value)
    return "[\n" + ",\n".join(f"  {_json(item)}" for item in value) + "\n]"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class CompiledTokenizer(Tokenizer):
    """A tokenizer that encodes long texts by the compiled core."""

    @abstractmethod
    def _encodes_compiled(self, n_bytes: int) -> bool:
        """True if the core should encode texts of about `n_bytes` together."""

    @abstractmethod
    def _encode_compiled(self, texts: Sequence[str], threads: int) -> "tuple[numpy.ndarray, numpy.ndarray]":
        """The result of `encode_documents`, by the compiled core."""

    def encode_batch(self, texts: Iterable[str], *, threads: int = 1) -> list[list[int]]:
        """Turn each text into a list of ids; special tokens in them are ordinary text."""
        texts = list(check_texts(texts))
        if not self._encodes_compiled(sum(map(len, texts))):
            return super().encode_batch(texts)
        joined, counts = self._encode_compiled(texts, threads)
        ids = joined.tolist()
        return [ids[start:end] for start, end in pairwise(accumulate(counts.tolist(), initial=0))]

    def encode_documents(self, texts: Sequence[str], *, threads: int = 1) -> "tuple[numpy.ndarray, numpy.ndarray]":
        """The concatenated ids of all texts, and how many each text has."""
        if not self._encodes_compiled(sum(map(len, texts))):
            return super().encode_documents(texts)
        return self._encode_compiled(texts, threads)

    def encode_to_numpy(self, text: str, *, threads: int = 1) -> "numpy.ndarray":
        """Turn text into ids of shape [n_tokens]: uint16 if every id fits, otherwise uint32.

        A long text is encoded by up to `threads` threads; the ids do not depend on their number.
        """
        if not self._encodes_compiled(len(text)):
            return super().encode_to_numpy(text)
        return self._encode_compiled([text], threads)[0]
