"""Building a napkin tokenizer from another library's tokens and the ranks of their merges, with the same ids.

In other libraries several pairs may make one token, or any two tokens whose concatenated bytes are a token. Only one of
these pairs is ever used: the merges within the bytes of a token do not depend on the text around it, so they are the
same as for these bytes alone. They are found here by merging the bytes of each token alone; the last merge becomes the
token's merge in napkin. If the bytes alone do not become the token, no merge makes it in any text. The ranks of merges
stay in their order, which need not be one of learning: Llama 3 has tokens of a lower rank than their parts.

GPT-2's representation of bytes as text: each byte is one printable character; a space is Ġ, a line feed Ċ.

Bytes that are printable in Latin-1 represent themselves; the others, in order, are the characters from U+0100 on.

Common to Hugging Face's and GPT-2's files: tokens in GPT-2's byte alphabet, and a list of merges.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import NO_TOKEN, BPETokenizer, RemappedBPETokenizer
from napkin.tokenizer.inspection import merges_of

Rank = Callable[[bytes, bytes], int | None]
"""The rank of the merge of two adjacent tokens, lowest first; None if they do not merge."""

# Of tiktoken 0.14 and tokenizers 0.23, by which they read a pattern's character classes.
LIBRARIES_UNICODE = "16.0"

# The others are control characters, and bytes that most scripts or all of UTF-8 do without.
_ORDINARY_BYTES = frozenset((0x09, 0x0A, 0x0D, *range(0x20, 0x7F), *range(0x80, 0xC0)))

_NEVER = 2**63
_MAX_TOKEN_BYTES = 4096
_MAX_UNUSED = 4096


@dataclass(frozen=True)
class Vocabulary:
    """The contents of another library's files."""

    ids: Mapping[bytes, int]
    """Ordinary tokens: bytes to id."""
    special_tokens: Mapping[str, int]
    pattern: str
    rank: Rank
    whole: bool
    """True if a pre-token that is a token is encoded as that token even if no merge makes it."""
    normalize: bool = False
    """True if text is brought into normal form C first."""
    text_tokens: Collection[str] = ()
    """Special tokens that mark no boundary."""
    drops_bytes: bool = False
    """True if the library leaves bytes out that have no token; those of ordinary text must have one all the same."""


def assemble(vocabulary: Vocabulary) -> Tokenizer:
    """A tokenizer with this vocabulary's ids.

    Unused ids above those of the ordinary tokens get special tokens named `<|unused_ID|>`.

    Raises NapkinError for a vocabulary that lacks a byte, has a gap in the ids of its ordinary tokens, a duplicate id,
    or a token of more than 4,096 bytes.
    """
    _check_bytes(vocabulary)
    specials = with_unused(vocabulary.ids, vocabulary.special_tokens)
    merges, unmerged = _merges_by_rank(vocabulary)
    made = [bytes([i]) for i in range(256)] + [first + second for first, second in merges]
    number = {token: i for i, token in enumerate(made)}
    pairs = [(number[first], number[second]) for first, second in merges]
    names = sorted(specials, key=specials.__getitem__)
    ids = [vocabulary.ids.get(token, NO_TOKEN) for token in (*made, *unmerged)] + [specials[name] for name in names]
    is_plain = not (unmerged or vocabulary.normalize or vocabulary.text_tokens)
    if is_plain and ids == list(range(len(ids))):
        return BPETokenizer(pairs, names, vocabulary.pattern, unicode_version=LIBRARIES_UNICODE)
    return RemappedBPETokenizer(
        pairs,
        names,
        vocabulary.pattern,
        ids=ids,
        unmerged=unmerged,
        whole=vocabulary.whole and bool(unmerged),
        normalize=vocabulary.normalize,
        text_tokens=vocabulary.text_tokens,
        unicode_version=LIBRARIES_UNICODE,
    )


def check_round_trip(path: object, tokenizer: Tokenizer, read: Callable[[], Tokenizer], format_name: str) -> None:
    """Raise NapkinError unless reading what was written in another library's format gives the same tokenizer.

    Only the version of Unicode may differ: no format can store it, and each library has its own.
    """
    try:
        reason = "" if _without_version(read()) == _without_version(tokenizer) else "it would give other ids"
    except NapkinError as error:
        reason = str(error)
    if reason:
        raise NapkinError(f"'{path}' was not written: {format_name} cannot represent this tokenizer exactly: {reason}")


def _without_version(tokenizer: Tokenizer) -> dict[str, object]:
    not_compared = ("unicode", "fingerprint")
    return {key: value for key, value in tokenizer.to_dict().items() if key not in not_compared}


def _check_bytes(vocabulary: Vocabulary) -> None:
    ids = vocabulary.ids
    lacking = [byte for byte in range(256) if bytes([byte]) not in ids]
    if lacking and not (vocabulary.drops_bytes and _ORDINARY_BYTES.isdisjoint(lacking)):
        raise NapkinError(
            f"{len(lacking)} of the 256 bytes have no token, among them 0x{lacking[0]:02X}: text with these bytes "
            "could not be encoded, a byte-level vocabulary is needed"
        )
    for token, i in ids.items():
        if not token:
            raise NapkinError(f"the token of id {i} is empty: a token needs at least one byte")
        if len(token) > _MAX_TOKEN_BYTES:
            raise NapkinError(
                f"the token of id {i} is {len(token):,} bytes long: at most {_MAX_TOKEN_BYTES:,} are supported"
            )


def with_unused(ids: Mapping[Any, int], special_tokens: Mapping[str, int]) -> dict[str, int]:
    """The special tokens, and one for each unused id. Raises NapkinError for ids that are not distinct and dense."""
    token_of: dict[int, object] = {}
    for token, i in (*ids.items(), *special_tokens.items()):
        if i < 0:
            raise NapkinError(f"token {token!r} has id {i}: ids start at 0")
        if i in token_of:
            raise NapkinError(f"id {i} is given to {token_of[i]!r} and to {token!r}: ids must be distinct")
        token_of[i] = token
    last = max(ids.values())
    # Counted before they are listed: a single huge id would mean a huge list.
    n_gaps = last + 1 - sum(1 for i in token_of if i <= last)
    if n_gaps:
        gap = next(i for i in range(last) if i not in token_of)
        raise NapkinError(
            f"no token has id {gap}, and {n_gaps:,} ids below the largest, {last:,}, are unused: "
            "a vocabulary without gaps is needed"
        )
    end = max(token_of) + 1
    if end - len(token_of) > _MAX_UNUSED:
        raise NapkinError(
            f"special token {token_of[end - 1]!r} has id {end - 1:,}, but there are {len(token_of):,} tokens: at most "
            f"{_MAX_UNUSED:,} ids may be unused"
        )
    unused = {f"<|unused_{i}|>": i for i in range(end) if i not in token_of}
    if clash := sorted(unused.keys() & special_tokens.keys()):
        raise NapkinError(f"special token {clash[0]!r} has the name that is reserved for an unused id: rename it")
    return {**special_tokens, **unused}


def _merges_by_rank(vocabulary: Vocabulary) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """The merge of each token that has one, in the order of application; the other tokens, ordered by id."""
    ranks: dict[tuple[bytes, bytes], int] = {}
    unmerged: list[bytes] = []
    for token in sorted(vocabulary.ids, key=vocabulary.ids.__getitem__):
        if len(token) == 1:
            continue
        parts = _down_to_two(token, vocabulary.rank)
        rank = vocabulary.rank(*parts) if len(parts) == 2 else None
        if rank is None:
            unmerged.append(token)
        else:
            ranks[parts[0], parts[1]] = rank
    return sorted(ranks, key=ranks.__getitem__), unmerged


def _down_to_two(token: bytes, rank: Rank) -> list[bytes]:
    """The bytes of a token, merged until two parts are left or no merge applies."""
    parts = [token[i : i + 1] for i in range(len(token))]
    ranks = [_rank_or_never(rank, *pair) for pair in pairwise(parts)]
    while len(parts) > 2 and (lowest := min(ranks)) < _NEVER:
        i = ranks.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del ranks[i]
        if i < len(ranks):
            ranks[i] = _rank_or_never(rank, parts[i], parts[i + 1])
        if i:
            ranks[i - 1] = _rank_or_never(rank, parts[i - 1], parts[i])
    return parts


def _rank_or_never(rank: Rank, first: bytes, second: bytes) -> int:
    found = rank(first, second)
    return _NEVER if found is None else found


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))

_CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
_BYTES = {character: byte for byte, character in _CHARACTERS.items()}


def to_characters(token: bytes) -> str:
    """A token as text.

    >>> to_characters(b" the")
    'Ġthe'
    """
    return "".join(map(_CHARACTERS.__getitem__, token))


def to_bytes(characters: str) -> bytes | None:
    """The token of a text; None if a character represents no byte.

    >>> to_bytes("Ġthe"), to_bytes("a b")
    (b' the', None)
    """
    try:
        return bytes(map(_BYTES.__getitem__, characters))
    except KeyError:
        return None


def ordinary_tokens(vocab: Mapping[str, int], special_tokens: Collection[str]) -> dict[bytes, int]:
    """Bytes and id of the tokens that are not special. Raises NapkinError for one that does not represent bytes."""
    ids: dict[bytes, int] = {}
    for characters, i in vocab.items():
        if characters in special_tokens:
            continue
        token = to_bytes(characters)
        if token is None:
            raise NapkinError(
                f"token {characters!r} (id {i}) has a character that represents no byte: a byte-level vocabulary is "
                "needed; or make it a special token"
            )
        ids[token] = i
    return ids


def ranks_of(merges: Iterable[tuple[str, ...]], ids: Mapping[bytes, int]) -> dict[tuple[bytes, bytes], int]:
    """The rank of each merge in the list. Raises NapkinError for a duplicate, or one with an unknown token."""
    ranks: dict[tuple[bytes, bytes], int] = {}
    for rank, parts in enumerate(merges):
        pair = _checked_pair(parts, ids, rank)
        if pair in ranks:
            raise NapkinError(
                f"merge {rank}, of {parts[0]!r} and {parts[1]!r}, repeats merge {ranks[pair]}: remove one"
            )
        ranks[pair] = rank
    return ranks


def _checked_pair(parts: tuple[str, ...], ids: Mapping[bytes, int], rank: int) -> tuple[bytes, bytes]:
    if len(parts) != 2:
        raise NapkinError(f"merge {rank} is {' '.join(parts)!r}: two tokens separated by one space are needed")
    first, second = (to_bytes(part) or b"" for part in parts)
    for characters, token in zip((*parts, "".join(parts)), (first, second, first + second), strict=True):
        if token not in ids:
            raise NapkinError(
                f"merge {rank} of {' '.join(parts)!r} needs {characters!r}, which is not in the vocabulary"
            )
    return first, second


def vocab_and_merges(tokenizer: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The ids of the tokens in GPT-2's byte alphabet, special tokens as they are; and the merges."""
    merges = merges_of(tokenizer)
    names = {i: token for token, i in tokenizer.special_tokens.items()}
    characters = [names.get(i) or to_characters(token) for i, token in enumerate(tokenizer.vocabulary)]
    pairs = [(characters[merge.first], characters[merge.second]) for merge in merges]
    return {token: i for i, token in enumerate(characters)}, pairs
