"""A text as several tokenizers see it, and the merges that build a piece of it."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import BPETokenizer, ByteTokenizer, RemappedBPETokenizer
from napkin.tokenizer.inspection import merge_steps, merges_of, printable
from napkin.tokenizer.pre_tokenization import PreTokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer

BYTES = "bytes of UTF-8"
"""The name of the tokenizer that is always there."""
LONGEST_TEXT = 20_000
LONGEST_PIECE = 200


@functools.lru_cache(maxsize=8)
def _opened(path: Path, changed: float) -> Tokenizer:
    return load_tokenizer(path)


def tokenizer_at(path: Path | None) -> Tokenizer:
    """The tokenizer of a file, read again where it has changed; None is that of bytes."""
    if path is None:
        return ByteTokenizer()
    try:
        changed = path.stat().st_mtime
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read: {error.strerror}") from None
    return _opened(path, changed)


def encoded(text: str, tokenizers: Sequence[tuple[str, Path | None]]) -> list[dict[str, Any]]:
    """The tokens of a text by each tokenizer, with their ids, their bytes and what they show, or why there are none."""
    if len(text) > LONGEST_TEXT:
        raise NapkinError(f"the text has {len(text):,} characters: use up to {LONGEST_TEXT:,}")
    size = len(text.encode("utf-8", errors="surrogatepass"))
    found = []
    for name, path in tokenizers:
        try:
            tokenizer = tokenizer_at(path)
            ids = tokenizer.encode(text)
        except NapkinError as error:
            found.append({"name": name, "error": str(error).splitlines()[0]})
            continue
        tokens = [[i, tokenizer.vocabulary[i].hex(" "), printable(tokenizer.vocabulary[i])] for i in ids]
        found.append(
            {
                "name": name,
                "kind": tokenizer.kind,
                "vocab_size": tokenizer.vocab_size,
                "tokens": tokens,
                "bytes_per_token": size / len(ids) if ids else None,
                "has_merges": isinstance(tokenizer, BPETokenizer | RemappedBPETokenizer),
            }
        )
    return found


def merged(text: str, path: Path | None) -> list[dict[str, Any]]:
    """Each pre-token of a short text, with the tokens after each merge that builds it.

    Raises NapkinError for a tokenizer without merges and for a text that is too long.
    """
    if not 0 < len(text) <= LONGEST_PIECE:
        raise NapkinError(f"the piece has {len(text):,} characters: use 1 to {LONGEST_PIECE}")
    tokenizer = tokenizer_at(path)
    if not isinstance(tokenizer, BPETokenizer | RemappedBPETokenizer):
        raise NapkinError(f"a tokenizer of kind '{tokenizer.kind}' has no merges: use one of kind 'bpe'")
    merges, vocabulary = merges_of(tokenizer), tokenizer.vocabulary
    pieces = []
    for piece in PreTokenizer(tokenizer.pattern, tokenizer.unicode_version).split(text):
        steps = []
        for number, ids in merge_steps(tokenizer, piece):
            joined = [] if number is None else [printable(vocabulary[i]) for i in merges[number][:2]]
            steps.append({"merge": number, "joins": joined, "tokens": [printable(vocabulary[i]) for i in ids]})
        pieces.append({"piece": printable(piece.encode()), "steps": steps})
    return pieces
