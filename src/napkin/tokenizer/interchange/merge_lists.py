"""What Hugging Face's and GPT-2's files have in common: tokens in GPT-2's alphabet, and a list of merges."""

from collections.abc import Collection, Iterable, Mapping

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.inspection import merges_of
from napkin.tokenizer.interchange.byte_alphabet import to_bytes, to_characters


def ordinary_tokens(vocab: Mapping[str, int], special_tokens: Collection[str]) -> dict[bytes, int]:
    """Bytes and id of the tokens that are not special. Raises NapkinError for one that stands for no bytes."""
    ids: dict[bytes, int] = {}
    for characters, i in vocab.items():
        if characters in special_tokens:
            continue
        token = to_bytes(characters)
        if token is None:
            raise NapkinError(
                f"token {characters!r} (id {i}) has a character that stands for no byte: a byte-level vocabulary is "
                "needed, in which it is ordinary text, or special"
            )
        ids[token] = i
    return ids


def ranks_of(merges: Iterable[tuple[str, ...]], ids: Mapping[bytes, int]) -> dict[tuple[bytes, bytes], int]:
    """Place of each merge in the list. Raises NapkinError for one given twice, or that names an unknown token."""
    ranks: dict[tuple[bytes, bytes], int] = {}
    for rank, parts in enumerate(merges):
        pair = _checked_pair(parts, ids, rank)
        if pair in ranks:
            raise NapkinError(
                f"merge {rank}, of {parts[0]!r} and {parts[1]!r}, is merge {ranks[pair]} too: name it once"
            )
        ranks[pair] = rank
    return ranks


def _checked_pair(parts: tuple[str, ...], ids: Mapping[bytes, int], rank: int) -> tuple[bytes, bytes]:
    if len(parts) != 2:
        raise NapkinError(f"merge {rank} is {' '.join(parts)!r}: two tokens with one space between them are needed")
    first, second = (to_bytes(part) or b"" for part in parts)
    for characters, token in zip((*parts, "".join(parts)), (first, second, first + second), strict=True):
        if token not in ids:
            raise NapkinError(
                f"merge {rank} of {' '.join(parts)!r} needs {characters!r}, which is not in the vocabulary"
            )
    return first, second


def written(tokenizer: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The tokens in GPT-2's alphabet, special ones as they are, with their ids; and the merges."""
    merges = merges_of(tokenizer)
    names = {i: token for token, i in tokenizer.special_tokens.items()}
    characters = [names.get(i) or to_characters(token) for i, token in enumerate(tokenizer.vocabulary)]
    pairs = [(characters[merge.first], characters[merge.second]) for merge in merges]
    return {token: i for i, token in enumerate(characters)}, pairs
