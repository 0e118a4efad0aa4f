"""Byte-pair encoding on characters with bytes for those that the vocabulary lacks: Llama 2, Mistral, Mixtral, Gemma.

SentencePiece (Kudo & Richardson 2018) writes a space as U+2581 and puts one before a text, so that a word has the same
tokens at its beginning as within it. So U+2581 in a text is encoded as a space; all else is lossless, but for a single
space at the beginning where `prefix` adds one only to texts without.

Merging symbols by the rank of their pairs: lowest rank first; for equal ranks, from left to right.

A pair may have a lower rank than the pairs that make its parts, and several pairs may make the same symbol. Two
algorithms with the same result: scanning all pairs for each merge is fastest for a word, but quadratic; long pieces (a
line of dashes, a megabyte of base64) take a heap of pairs.
"""

import heapq
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, SupportsIndex

from napkin.errors import NapkinError
from napkin.tokenizer.base import CompiledTokenizer
from napkin.tokenizer.numba.dispatch import should_encode_compiled
from napkin.tokenizer.text_input import check_special_tokens, checked_text_tokens, utf8

if TYPE_CHECKING:
    import numpy

    from napkin.tokenizer.numba.characters import CharacterVocabulary
    from napkin.tokenizer.numba.encoding import Encoder

Ranks = Mapping[tuple[int, int], int]
"""Pair of ids to its rank, from 0 on."""

_LONG = 48
_CACHED_PIECES = 2**17
_CACHED_LENGTH = 256
# Shorter texts, in characters, are never worth the compiled core; nor are fewer bytes per merge, in all texts so far,
# worth its tables.
_MIN_COMPILED_LENGTH = 2**10
_MIN_BYTES_PER_MERGE = 6
_MAPPED_IDS = 2**16


def merge_symbols(ids: list[int], ranks: Ranks, made: Sequence[int]) -> list[int]:
    """The ids after all applicable merges; the pair of rank r becomes `made[r]`. `ids` may be changed.

    >>> merge_symbols([0, 0, 1], {(2, 1): 0, (0, 0): 1}, [3, 2])
    [3]
    """
    return merge_by_scanning(ids, ranks, made) if len(ids) < _LONG else merge_by_heap(ids, ranks, made)


def merge_by_scanning(ids: list[int], ranks: Ranks, made: Sequence[int]) -> list[int]:
    """Find the lowest rank among all pairs, merge its leftmost occurrence, repeat: O(n²)."""
    never, rank_of = len(made), ranks.get
    found = [rank_of(pair, never) for pair in pairwise(ids)]
    while found and (rank := min(found)) < never:
        i = found.index(rank)
        merged = made[rank]
        ids[i : i + 2] = [merged]
        del found[i]
        if i < len(found):
            found[i] = rank_of((merged, ids[i + 1]), never)
        if i:
            found[i - 1] = rank_of((ids[i - 1], merged), never)
    return ids


def merge_by_heap(ids: list[int], ranks: Ranks, made: Sequence[int]) -> list[int]:
    """Take pairs from a heap, by rank and place; one that has changed since it was put there is skipped: O(n log n)."""
    end = len(ids)
    following = list(range(1, end + 1))  # the place of the next symbol
    preceding = list(range(-1, end))
    heap = [(rank, i) for i, pair in enumerate(pairwise(ids)) if (rank := ranks.get(pair)) is not None]
    heapq.heapify(heap)
    while heap:
        rank, i = heapq.heappop(heap)
        j = following[i]
        # A symbol that was merged into the one before it has the id -1, which no pair contains.
        if j == end or ranks.get((ids[i], ids[j])) != rank:
            continue
        ids[i], ids[j] = made[rank], -1
        k = following[i] = following[j]
        preceding[k] = i
        if k < end and (right := ranks.get((ids[i], ids[k]))) is not None:
            heapq.heappush(heap, (right, i))
        h = preceding[i]
        if h >= 0 and (left := ranks.get((ids[h], ids[i]))) is not None:
            heapq.heappush(heap, (left, h))
    return [i for i in ids if i >= 0]


class PieceCache(dict[str, Sequence[int]]):
    """Pieces of text to ids, each computed once: few distinct pieces make up most of a text."""

    def __init__(self, compute: Callable[[str], Sequence[int]]) -> None:
        self._compute = compute

    def __missing__(self, piece: str) -> Sequence[int]:
        ids = self._compute(piece)
        if len(piece) <= _CACHED_LENGTH:
            # Clearing the whole cache adapts it to a text whose words change; frequent ones are soon back.
            if len(self) >= _CACHED_PIECES:
                self.clear()
            self[piece] = ids
        return ids


Prefix = Literal["none", "always", "if_missing", "first_if_missing"]
"""The space before a text, and before each part of it between special tokens: none; always; where there is none yet;
where there is none yet, and before the first part only."""

SPACE = "\u2581"

_MAX_TOKEN_CHARACTERS = 4096


class CharacterBPETokenizer(CompiledTokenizer):
    """`tokens[id]` is the text of an id; those at `byte_ids` are the 256 bytes, whatever their text is. That of a byte
    below 128 may be its character's own token, as Gemma has it for the tab.

    Merge i joins two tokens into the one whose text is theirs together; merges of a lower number come first.
    `special_tokens` map what stands for them in a text to their ids; ordinary text never becomes one of the ids
    `hidden`. With `splits_spaces`, no token reaches from before a space into it. `decode` leaves out one space at the
    beginning if `strips_space`, as it must where a prefix adds it; `decode_bytes` gives it, since ids may continue a
    text.

    Raises NapkinError for byte ids that are not 256 distinct ones, ids outside the vocabulary, a merge whose result is
    not in it or that is given twice, and two tokens with the same text.
    """

    kind: ClassVar[str] = "character-bpe"
    is_splittable = False

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[tuple[int, int]],
        special_tokens: Mapping[str, int],
        *,
        byte_ids: Sequence[int],
        hidden: Sequence[int] = (),
        prefix: Prefix = "always",
        splits_spaces: bool = False,
        strips_space: bool = True,
        text_tokens: Collection[str] = (),
    ) -> None:
        check_special_tokens(list(special_tokens))
        self.tokens, self.byte_ids, self.merges = list(tokens), list(byte_ids), [(i, j) for i, j in merges]
        self.special_tokens = dict(special_tokens)
        self.text_tokens = checked_text_tokens(text_tokens, self.special_tokens)
        self.prefix: Prefix = prefix
        self.splits_spaces, self.strips_space = splits_spaces, strips_space
        self.hidden = list(hidden)
        self._check_ids()
        self.vocabulary = [utf8(token, f"token {i}") for i, token in enumerate(self.tokens)]
        for byte, i in enumerate(self.byte_ids):
            self.vocabulary[i] = bytes([byte])
        characters = enumerate(self.tokens[i] for i in self.byte_ids)
        own = {self.byte_ids[byte] for byte, token in characters if token == chr(byte) and byte < 128}
        self._bytes = frozenset(self.byte_ids) - own
        self._id_of = self._ids_by_text()
        self._ranks, self._made = self._checked_merges()
        self._ids_of = PieceCache(self.merge_symbols_of)
        self._bytes_until_compiled = _MIN_BYTES_PER_MERGE * len(self.merges)

    def encode_parts(self, parts: Sequence[str]) -> list[int]:
        """The ids of ordinary texts and special tokens in turn; see `Tokenizer.encode_parts`."""
        ids: list[int] = []
        for i, part in enumerate(parts):
            ids += [self.special_tokens[part]] if i % 2 else self._encode_part(part, first=i == 0)
        return ids

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Turn ids into text. Bytes that are not valid UTF-8 become U+FFFD, each of them.

        Raises NapkinError for an id outside the vocabulary.
        """
        numbers = [i.__index__() for i in ids]
        self.decode_bytes(numbers)
        text = "".join(
            _text_of_bytes(bytes(self.vocabulary[i][0] for i in some)) if is_byte else "".join(map(self._text, some))
            for is_byte, some in groupby(numbers, self._bytes.__contains__)
        )
        return text.removeprefix(" ") if self.strips_space else text

    def merge_symbols_of(self, piece: str) -> list[int]:
        """The ids of a text within which symbols may merge, without cache."""
        ids: list[int] = []
        for character in piece:
            found = self._id_of.get(character)
            ids += map(self.byte_ids.__getitem__, character.encode()) if found is None else (found,)
        return merge_symbols(ids, self._ranks, self._made)

    def _text(self, i: int) -> str:
        return self.tokens[i]

    def _encode_ordinary(self, text: str) -> list[int]:
        return self._encode_part(text, first=True)

    def _encode_part(self, text: str, *, first: bool) -> list[int]:
        if len(text) >= _MIN_COMPILED_LENGTH and self._encodes_compiled(len(text)):
            return self._encode_compiled([text], first=first)[0].tolist()
        prefixed = self._prefix_of(text, first=first) + text.replace(SPACE, " ")
        return list(chain.from_iterable(map(self._ids_of.__getitem__, self._pieces.findall(prefixed))))

    def _encode_compiled(
        self, texts: Sequence[str], threads: int = 1, *, first: bool = True
    ) -> "tuple[numpy.ndarray, numpy.ndarray]":
        """The concatenated ids of texts, and how many each has."""
        parts: list[bytes] = []
        for text in texts:
            parts += [self._prefix_of(text, first=first).encode(), utf8(text).replace(SPACE.encode(), b" ")]
        ends = list(accumulate(map(len, parts)))[1::2]
        ids, counts = self._encoder.encode(b"".join(parts), ends, dtype=self.id_dtype, threads=threads)
        # In place and in parts, since each symbol becomes an index of 8 bytes.
        for start in range(0, len(ids), _MAPPED_IDS):
            part = ids[start : start + _MAPPED_IDS]
            part[:] = self._id_of_symbol[part]
        return ids, counts

    def _encodes_compiled(self, n_bytes: int) -> bool:
        if not should_encode_compiled(n_bytes):
            return False
        self._bytes_until_compiled -= n_bytes
        return self._bytes_until_compiled <= 0 and self._symbols is not None

    @cached_property
    def _symbols(self) -> "CharacterVocabulary | None":
        from napkin.tokenizer.numba.characters import character_vocabulary

        return character_vocabulary(
            self.tokens, self._id_of, self.byte_ids, self._ranks, self._made, splits_spaces=self.splits_spaces
        )

    @cached_property
    def _encoder(self) -> "Encoder":
        from napkin.tokenizer.numba.encoding import Encoder

        return Encoder([], "whole", characters=self._symbols)

    @cached_property
    def _id_of_symbol(self) -> "numpy.ndarray":
        assert self._symbols is not None
        return self._symbols.ids.astype(self.id_dtype)

    def _prefix_of(self, text: str, *, first: bool) -> str:
        if self.prefix == "none" or not text:
            return ""
        if self.prefix == "always":
            return " "
        return "" if text.startswith((" ", SPACE)) or not (first or self.prefix == "if_missing") else " "

    @cached_property
    def _pieces(self) -> re.Pattern[str]:
        """Pieces of a text such that no merge crosses the place between two of them."""
        if self.splits_spaces:
            return re.compile(" [^ ]*+|[^ ]++")
        merged = {self.tokens[i] for i in self._made}
        if any(" " in token.lstrip(" ") for token in merged):
            return re.compile("(?s:.+)")
        if any("\n" in token for token in merged):
            return re.compile(" *+[^ ]++| ++")
        return re.compile(" *[^ \n]++| ++|\n")

    def _ids_by_text(self) -> dict[str, int]:
        found: dict[str, int] = {}
        left_out = self._bytes.union(self.hidden)
        for i, token in enumerate(self.tokens):
            if i in left_out:
                continue
            if found.setdefault(token, i) != i:
                raise NapkinError(f"token {token!r} has the ids {found[token]} and {i}: remove one")
        return found

    def _check_ids(self) -> None:
        n_tokens = len(self.tokens)
        if len(self.byte_ids) != 256 or len(set(self.byte_ids)) != 256:
            raise NapkinError(f"{len(set(self.byte_ids))} distinct ids are given for the 256 bytes: give one for each")
        for i in (*self.byte_ids, *self.hidden, *self.special_tokens.values(), *chain.from_iterable(self.merges)):
            if not 0 <= i < n_tokens:
                raise NapkinError(f"id {i} is outside 0 to {n_tokens - 1}, the ids of {n_tokens} tokens")
        for i, token in enumerate(self.tokens):
            if not token or len(token) > _MAX_TOKEN_CHARACTERS:
                raise NapkinError(f"token {i} has {len(token):,} characters: 1 to {_MAX_TOKEN_CHARACTERS:,} are needed")

    def _checked_merges(self) -> tuple[Ranks, list[int]]:
        ranks: dict[tuple[int, int], int] = {}
        made: list[int] = []
        for pair in self.merges:
            text = self.tokens[pair[0]] + self.tokens[pair[1]]
            merged = self._id_of.get(text)
            if merged is None:
                raise NapkinError(f"merge {len(made)} makes {text!r}, which is not in the vocabulary")
            if ranks.setdefault(pair, len(made)) != len(made):
                raise NapkinError(f"merge {len(made)}, which makes {text!r}, is given twice: remove one")
            made.append(merged)
        return ranks, made

    def _content(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "prefix": self.prefix,
            "splits_spaces": self.splits_spaces,
            "strips_space": self.strips_space,
            "special_tokens": list(self.special_tokens),
            "special_ids": list(self.special_tokens.values()),
            "byte_ids": self.byte_ids,
            "hidden": self.hidden,
            "tokens": self.tokens,
            "merges": [list(pair) for pair in self.merges],
            # Written only if there are any, so that other files keep their fingerprint.
            **({"text_tokens": sorted(self.text_tokens)} if self.text_tokens else {}),
        }


def _text_of_bytes(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(content)
