"""GPT-2's two files: vocab.json says which id each token has, merges.txt which pairs merge, a line a pair, in order.

Tokens are written in GPT-2's alphabet of bytes (see byte_alphabet.py). The pattern is not in the files: it is GPT-2's.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from napkin.errors import NapkinError
from napkin.files import StrPath, atomic_file
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.inspection import pattern_of
from napkin.tokenizer.interchange.assembly import Vocabulary, assemble, same_after_reading
from napkin.tokenizer.interchange.files import decode_json, decode_text, naming, read_bytes
from napkin.tokenizer.interchange.merge_lists import ordinary_tokens, ranks_of, written

VOCABULARY_NAME = "vocab.json"
MERGES_NAME = "merges.txt"

_HEADER = "#version: 0.2"


def read_gpt2(
    vocabulary: StrPath, merges: StrPath, *, pattern: str = "gpt2", special_tokens: Sequence[str] | None = None
) -> Tokenizer:
    """Read vocab.json and merges.txt (encoder.json and vocab.bpe, as they were called first).

    `special_tokens` are tokens of vocab.json that no merge may make; None is all that are neither bytes nor made by a
    merge, such as `<|endoftext|>`. Raises NapkinError, naming the files, for what is damaged.
    """
    contents = read_bytes(vocabulary), read_bytes(merges)
    with naming(vocabulary, merges):
        return parse(*contents, pattern, special_tokens)


def write_gpt2(tokenizer: Tokenizer, folder: StrPath, *, overwrite: bool = False) -> None:
    """Write vocab.json and merges.txt into a folder.

    Raises NapkinError for a tokenizer that is not BPE with GPT-2's pattern, and where one of the files exists or
    cannot be written.
    """
    vocab, merges = written(tokenizer)
    pattern = pattern_of(tokenizer)
    if pattern != "gpt2":
        raise NapkinError(
            f"'{folder}' is not written: GPT-2's files have no place for the pattern {pattern!r} and are read with "
            "GPT-2's: use the format huggingface"
        )
    vocabulary = msgspec.json.encode(vocab)
    lines = [_HEADER, *map(" ".join, merges)]
    merge_lines = ("\n".join(lines) + "\n").encode()
    names = list(tokenizer.special_tokens)
    same_after_reading(folder, tokenizer, lambda: parse(vocabulary, merge_lines, pattern, names), "GPT-2's files")
    paths = Path(folder) / VOCABULARY_NAME, Path(folder) / MERGES_NAME
    with atomic_file(paths[0], overwrite=overwrite) as first, atomic_file(paths[1], overwrite=overwrite) as second:
        first.write(vocabulary)
        second.write(merge_lines)


def parse(vocabulary: bytes, merges: bytes, pattern: str, special_tokens: Sequence[str] | None) -> Tokenizer:
    """Read what the two files hold."""
    vocab: dict[str, int] = decode_json(vocabulary, dict[str, int])
    pairs = [tuple(line.split(" ")) for line in _lines(merges)]
    if special_tokens is None:
        made = {"".join(pair) for pair in pairs}
        special_tokens = [token for token in vocab if len(token) != 1 and token not in made]
    if lacking := [token for token in special_tokens if token not in vocab]:
        raise NapkinError(f"special token {lacking[0]!r} is not in the vocabulary: name one that is")
    specials = {token: vocab[token] for token in special_tokens}
    ids = ordinary_tokens(vocab, specials)
    ranks = ranks_of(pairs, ids)
    return assemble(
        Vocabulary(
            ids=ids,
            special_tokens=specials,
            pattern=pattern,
            rank=lambda first, second: ranks.get((first, second)),
            whole=False,
        )
    )


def _lines(merges: bytes) -> list[str]:
    lines = decode_text(merges).split("\n")
    if lines and lines[0].startswith("#version"):
        del lines[0]
    # A line end at the end begins no line, also where it is Windows'.
    return [line.removesuffix("\r") for line in lines if line.strip("\r")]
