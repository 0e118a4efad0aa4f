"""GPT-2's two files: vocab.json maps tokens to ids, merges.txt lists the merges in order, one per line.

Tokens are in GPT-2's byte alphabet (see byte_alphabet.py). The pattern is not in the files: it is always GPT-2's.
"""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import msgspec

from napkin.errors import NapkinError
from napkin.files import StrPath, atomic_file
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.inspection import pattern_of
from napkin.tokenizer.interchange.assembly import Vocabulary, assemble, check_round_trip
from napkin.tokenizer.interchange.decoding import decode_json, decode_text, naming, read_bytes
from napkin.tokenizer.interchange.merge_list import ordinary_tokens, ranks_of, vocab_and_merges
from napkin.tokenizer.text_input import check_special_tokens

VOCABULARY_NAME = "vocab.json"
MERGES_NAME = "merges.txt"

_HEADER = "#version: 0.2"


def read_gpt2(
    vocabulary: StrPath, merges: StrPath, *, pattern: str = "gpt2", special_tokens: Sequence[str] | None = None
) -> Tokenizer:
    """Read vocab.json and merges.txt (first published as encoder.json and vocab.bpe).

    `special_tokens` that are not in vocab.json get the ids after its last; None means all in it that are neither bytes
    nor made by a merge, such as `<|endoftext|>`. Raises NapkinError, naming the files, if they are damaged.
    """
    contents = read_bytes(vocabulary), read_bytes(merges)
    with naming(vocabulary, merges):
        return parse(*contents, pattern, special_tokens)


def write_gpt2(tokenizer: Tokenizer, folder: StrPath, *, overwrite: bool = False) -> None:
    """Write vocab.json and merges.txt into a folder.

    Raises NapkinError for a tokenizer that is not BPE with GPT-2's pattern, and if one of the files exists or cannot be
    written.
    """
    vocab, merges = vocab_and_merges(tokenizer)
    pattern = pattern_of(tokenizer)
    if pattern != "gpt2":
        raise NapkinError(
            f"'{folder}' was not written: GPT-2's files cannot store the pattern {pattern!r} and imply "
            "GPT-2's: use the format huggingface"
        )
    vocabulary = msgspec.json.encode(vocab)
    lines = [_HEADER, *map(" ".join, merges)]
    merge_lines = ("\n".join(lines) + "\n").encode()
    names = list(tokenizer.special_tokens)
    check_round_trip(folder, tokenizer, lambda: parse(vocabulary, merge_lines, pattern, names), "GPT-2's files")
    paths = Path(folder) / VOCABULARY_NAME, Path(folder) / MERGES_NAME
    with atomic_file(paths[0], overwrite=overwrite) as first, atomic_file(paths[1], overwrite=overwrite) as second:
        first.write(vocabulary)
        second.write(merge_lines)


def parse(vocabulary: bytes, merges: bytes, pattern: str, special_tokens: Sequence[str] | None) -> Tokenizer:
    """Build a tokenizer from the contents of the two files."""
    vocab: dict[str, int] = decode_json(vocabulary, dict[str, int])
    pairs = [tuple(line.split(" ")) for line in _lines(merges)]
    if special_tokens is None:
        made = {"".join(pair) for pair in pairs}
        special_tokens = [token for token in vocab if len(token) != 1 and token not in made]
    check_special_tokens(special_tokens)
    following = count(max(vocab.values(), default=-1) + 1)
    specials = {token: vocab[token] if token in vocab else next(following) for token in special_tokens}
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
    # The last line end begins no line, even if it is a Windows one.
    return [line.removesuffix("\r") for line in lines if line.strip("\r")]
