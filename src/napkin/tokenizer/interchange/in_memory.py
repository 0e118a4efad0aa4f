"""A tokenizer from a vocabulary and merges that are in memory, as bytes."""

from collections.abc import Mapping, Sequence

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.interchange.assembly import Vocabulary, assemble
from napkin.tokenizer.interchange.expressions import known_pattern
from napkin.tokenizer.text_input import check_special_tokens


def from_vocabulary(
    vocabulary: Mapping[bytes, int],
    merges: Sequence[tuple[bytes, bytes]],
    *,
    pattern: str,
    special_tokens: Mapping[str, int] | Sequence[str] = (),
) -> Tokenizer:
    """A tokenizer with the ids of `vocabulary`, ordinary tokens to ids, that applies `merges` in their order.

    `pattern` is the name of a napkin pattern or a regular expression. Special tokens have the given ids, or those after
    the last one. Raises NapkinError for a merge of or to a token that is not in the vocabulary, or given twice, and for
    a vocabulary that lacks a byte, has a gap in its ids, or a duplicate.

    >>> vocabulary = {bytes([i]): i for i in range(256)} | {b"th": 256}
    >>> from_vocabulary(vocabulary, [(b"t", b"h")], pattern="gpt2", special_tokens=["<end>"]).encode("the")
    [256, 101]
    """
    ranks: dict[tuple[bytes, bytes], int] = {}
    for rank, (first, second) in enumerate(merges):
        for token in (first, second, first + second):
            if token not in vocabulary:
                raise NapkinError(
                    f"merge {rank} of {first!r} and {second!r} needs {token!r}, which is not in the vocabulary"
                )
        if ranks.setdefault((first, second), rank) != rank:
            raise NapkinError(
                f"merge {rank}, of {first!r} and {second!r}, repeats merge {ranks[first, second]}: remove one"
            )
    if not isinstance(special_tokens, Mapping):
        check_special_tokens(special_tokens)
        following = max(vocabulary.values(), default=-1) + 1
        special_tokens = {token: following + i for i, token in enumerate(special_tokens)}
    return assemble(
        Vocabulary(
            ids=vocabulary,
            special_tokens=special_tokens,
            pattern=known_pattern(pattern) or pattern,
            rank=lambda first, second: ranks.get((first, second)),
            whole=False,
        )
    )
