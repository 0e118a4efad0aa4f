"""tiktoken's rank files (`cl100k_base.tiktoken`): per line a token's bytes in base64 and its id, which is its rank.

Any two tokens whose concatenated bytes are a token may merge, the lowest rank first, and a pre-token that is a token is
encoded as that token. The pattern and the special tokens are not in the file, but in the program that reads it.

GPT-2's two files: vocab.json maps tokens to ids, merges.txt lists the merges in order, one per line.

Tokens are in GPT-2's byte alphabet (see assembly.py). The pattern is not in the files: it is always GPT-2's.

A tokenizer from a vocabulary and merges that are in memory, as bytes.
"""

import binascii
from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import msgspec

from napkin.errors import NapkinError
from napkin.files import StrPath, atomic_file, atomic_write_bytes
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.inspection import merges_of, pattern_of
from napkin.tokenizer.interchange.assembly import (
    Vocabulary,
    assemble,
    check_round_trip,
    ordinary_tokens,
    ranks_of,
    vocab_and_merges,
)
from napkin.tokenizer.interchange.huggingface import decode_json, decode_text, naming, read_bytes
from napkin.tokenizer.interchange.huggingface_fields import known_pattern
from napkin.tokenizer.text_input import check_special_tokens

SpecialTokens = Mapping[str, int | None] | Mapping[str, int] | Sequence[str]


def read_tiktoken(path: StrPath, *, pattern: str, special_tokens: SpecialTokens = ()) -> Tokenizer:
    """Read a rank file. The ids are those of tiktoken with the same pattern and special tokens.

    `pattern` is the name of a napkin pattern, or a regular expression. `special_tokens` have the given ids; None means
    the next id after all previous ones. Raises NapkinError, naming file and line, if the file is damaged.
    """
    content = read_bytes(path)
    with naming(path):
        return parse(content, pattern, special_tokens)


def write_tiktoken(tokenizer: Tokenizer, path: StrPath, *, overwrite: bool = False) -> None:
    """Write a BPE tokenizer as a rank file, without its pattern and its special tokens.

    Raises NapkinError for another kind of tokenizer, if the ids are not in the order of the merges, and if another
    file exists or it cannot be written.
    """
    merged = [merge.merged for merge in merges_of(tokenizer)]
    if merged != sorted(merged):
        raise NapkinError(
            f"'{path}' was not written: the ids of this tokenizer are not in the order of its merges, but a rank file "
            "has a single number for both: use the format huggingface"
        )
    special = set(tokenizer.special_tokens.values())
    lines = [b64encode(token) + b" %d\n" % i for i, token in enumerate(tokenizer.vocabulary) if i not in special]
    content = b"".join(lines)
    pattern = pattern_of(tokenizer)
    check_round_trip(path, tokenizer, lambda: parse(content, pattern, tokenizer.special_tokens), "a rank file")
    atomic_write_bytes(path, content, overwrite=overwrite)


def parse(content: bytes, pattern: str, special_tokens: SpecialTokens) -> Tokenizer:
    """Build a tokenizer from the contents of a rank file."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            token, rank = _token_and_rank(line, number)
            if token in ranks:
                raise NapkinError(f"line {number} gives {token!r} a second rank, {rank}: it already has {ranks[token]}")
            ranks[token] = rank
    if not ranks:
        raise NapkinError("it contains no tokens: each line needs a token's bytes in base64, a space, and its rank")
    return assemble(
        Vocabulary(
            ids=ranks,
            special_tokens=_numbered(special_tokens, max(ranks.values()) + 1),
            pattern=known_pattern(pattern) or pattern,
            rank=lambda first, second: ranks.get(first + second),
            whole=True,
        )
    )


def _numbered(special_tokens: SpecialTokens, following: int) -> dict[str, int]:
    if not isinstance(special_tokens, Mapping):
        check_special_tokens(special_tokens)
        special_tokens = dict.fromkeys(special_tokens)
    numbered: dict[str, int] = {}
    for token, given in special_tokens.items():
        numbered[token] = following if given is None else given
        following = max(following, numbered[token] + 1)
    return numbered


def _token_and_rank(line: bytes, number: int) -> tuple[bytes, int]:
    match line.split():
        case [token, rank] if rank.isdigit() and len(rank) <= 18:
            try:
                return binascii.a2b_base64(token, strict_mode=True), int(rank)
            except binascii.Error as error:
                raise NapkinError(f"line {number}, {_shortened(line)}, is truncated or altered: {error}") from error
    raise NapkinError(
        f"line {number} is {_shortened(line)}: a token's bytes in base64, a space and its rank are needed"
    )


def _shortened(line: bytes) -> str:
    return repr(line if len(line) <= 40 else line[:40] + b"...")[1:]


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
        return parse_gpt2(*contents, pattern, special_tokens)


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
    check_round_trip(folder, tokenizer, lambda: parse_gpt2(vocabulary, merge_lines, pattern, names), "GPT-2's files")
    paths = Path(folder) / VOCABULARY_NAME, Path(folder) / MERGES_NAME
    with atomic_file(paths[0], overwrite=overwrite) as first, atomic_file(paths[1], overwrite=overwrite) as second:
        first.write(vocabulary)
        second.write(merge_lines)


def parse_gpt2(vocabulary: bytes, merges: bytes, pattern: str, special_tokens: Sequence[str] | None) -> Tokenizer:
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
