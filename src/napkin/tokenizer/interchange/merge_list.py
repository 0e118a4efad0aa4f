"""What Hugging Face's and GPT-2's files have in common: tokens in GPT-2's byte alphabet, and a list of merges."""

from collections.abc import Collection, Iterable, Mapping

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.inspection import merges_of
from napkin.tokenizer.interchange.byte_alphabet import to_bytes, to_characters


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
