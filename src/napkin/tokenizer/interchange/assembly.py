"""From a table of tokens and a rule that says which pairs merge first, to a napkin tokenizer with the same ids.

Other libraries let several pairs make one token, or any two tokens whose bytes joined are a token. Of these pairs one
is ever used: what happens within the bytes of a token while they become it does not depend on what stands around
them, so they become it in the way they do alone. That way is found here by merging each token's bytes alone; it is
the token's one merge in napkin. A token that its bytes alone do not become is made by no merge in any text.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.renumbered import RenumberedBPETokenizer

Rank = Callable[[bytes, bytes], int | None]
"""When two neighbouring tokens are merged, lowest first; None is never."""

_NEVER = 2**63
_LONGEST = 4096
_MOST_UNUSED = 4096


@dataclass(frozen=True)
class Vocabulary:
    """What another library's files say."""

    ids: Mapping[bytes, int]
    """Ordinary tokens: bytes to id."""
    special_tokens: Mapping[str, int]
    pattern: str
    rank: Rank
    whole: bool
    """Whether a pre-token that is a token is encoded as it, made by merges or not."""


def assemble(vocabulary: Vocabulary) -> Tokenizer:
    """A tokenizer with this vocabulary's ids.

    An id that no token has, beyond those of the ordinary tokens, goes to a special token `<|unused_ID|>`.

    Raises NapkinError for a vocabulary that lacks a byte, has a hole between its ordinary tokens or an id twice, has
    a token of more than 4,096 bytes, or one that is made of a token that is only learned after it.
    """
    _check_bytes(vocabulary)
    specials = _with_unused(vocabulary)
    merges, unmerged = _learned_order(vocabulary)
    made = [bytes([i]) for i in range(256)] + [first + second for first, second in merges]
    number = {token: i for i, token in enumerate(made)}
    pairs = [(number[first], number[second]) for first, second in merges]
    names = sorted(specials, key=specials.__getitem__)
    ids = [vocabulary.ids[token] for token in (*made, *unmerged)] + [specials[name] for name in names]
    if not unmerged and ids == list(range(len(ids))):
        return BPETokenizer(pairs, names, vocabulary.pattern)
    return RenumberedBPETokenizer(
        pairs, names, vocabulary.pattern, ids=ids, unmerged=unmerged, whole=vocabulary.whole and bool(unmerged)
    )


def same_after_reading(path: object, tokenizer: Tokenizer, read: Callable[[], Tokenizer], form: str) -> None:
    """Raise NapkinError unless what was written in another library's form is this tokenizer when it is read."""
    try:
        reason = "" if read().fingerprint == tokenizer.fingerprint else "they would give other ids"
    except NapkinError as error:
        reason = str(error)
    if reason:
        raise NapkinError(f"'{path}' is not written, {form} cannot say this tokenizer exactly: {reason}")


def _check_bytes(vocabulary: Vocabulary) -> None:
    ids = vocabulary.ids
    if lacking := [byte for byte in range(256) if bytes([byte]) not in ids]:
        raise NapkinError(
            f"{len(lacking)} of the 256 bytes have no token, 0x{lacking[0]:02X} among them: text with these could not "
            "be encoded, a byte-level vocabulary is needed"
        )
    for token, i in ids.items():
        if not token:
            raise NapkinError(f"the token of id {i} is empty: each needs at least one byte")
        if len(token) > _LONGEST:
            raise NapkinError(f"the token of id {i} is {len(token):,} bytes long: at most {_LONGEST:,} are read")


def _with_unused(vocabulary: Vocabulary) -> dict[str, int]:
    """The special tokens, and one for each id that would be a hole."""
    token_of: dict[int, object] = {}
    for token, i in (*vocabulary.ids.items(), *vocabulary.special_tokens.items()):
        if i < 0:
            raise NapkinError(f"token {token!r} has id {i}: ids begin at 0")
        if i in token_of:
            raise NapkinError(f"id {i} is given to {token_of[i]!r} and to {token!r}: each needs its own")
        token_of[i] = token
    last = max(vocabulary.ids.values())
    # Counted before they are listed: a single huge id would make as many holes.
    n_holes = last + 1 - sum(1 for i in token_of if i <= last)
    if n_holes:
        hole = next(i for i in range(last) if i not in token_of)
        raise NapkinError(
            f"no token has id {hole}, and {n_holes:,} ids below the largest, {last:,}, are nobody's: "
            "a vocabulary without holes is needed"
        )
    end = max(token_of) + 1
    if end - len(token_of) > _MOST_UNUSED:
        raise NapkinError(
            f"special token {token_of[end - 1]!r} has id {end - 1:,} where there are {len(token_of):,} tokens: at most "
            f"{_MOST_UNUSED:,} ids may be left unused"
        )
    unused = {f"<|unused_{i}|>": i for i in range(end) if i not in token_of}
    if clash := sorted(unused.keys() & vocabulary.special_tokens.keys()):
        raise NapkinError(f"special token {clash[0]!r} has the name of an id that no token has: give it another")
    return {**vocabulary.special_tokens, **unused}


def _learned_order(vocabulary: Vocabulary) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """The one merge of each token that has one, in the order they apply; the other tokens by their id."""
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
    merges = sorted(ranks, key=ranks.__getitem__)
    made = {bytes([byte]) for byte in range(256)}
    for first, second in merges:
        for part in (first, second):
            if part not in made:
                raise NapkinError(
                    f"token {first + second!r} (id {vocabulary.ids[first + second]}) is made of {part!r}, which is "
                    "learned after it: only tokens made of earlier ones can be read"
                )
        made.add(first + second)
    return merges, unmerged


def _down_to_two(token: bytes, rank: Rank) -> list[bytes]:
    """The bytes of a token merged until two parts are left, or no merge applies."""
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
