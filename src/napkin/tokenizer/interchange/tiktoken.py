"""tiktoken's rank files (`cl100k_base.tiktoken`): per line a token's bytes in base64 and its id, which is its rank.

Any two tokens whose concatenated bytes are a token may merge, the lowest rank first, and a pre-token that is a token is
encoded as that token. The pattern and the special tokens are not in the file, but in the program that reads it.
"""

import binascii
from base64 import b64encode
from collections.abc import Mapping, Sequence

from napkin.errors import NapkinError
from napkin.files import StrPath, atomic_write_bytes
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.inspection import merges_of, pattern_of
from napkin.tokenizer.interchange.assembly import Vocabulary, assemble, check_round_trip
from napkin.tokenizer.interchange.decoding import naming, read_bytes
from napkin.tokenizer.interchange.expressions import known_pattern
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
