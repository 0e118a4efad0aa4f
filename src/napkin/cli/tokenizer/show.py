"""`napkin tokenizer show`."""

from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.text import Text

from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.cli.tokenizer.texts import split_text
from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.inspection import Merge, longest_tokens, merge_steps, merges_of, pattern_of, printable
from napkin.tokenizer.pre_tokenization import PreTokenizer
from napkin.tokenizer.remapped_bpe import RemappedBPETokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer

LONGEST_WORD = 1000
WIDEST = 40

Step = tuple[int | None, list[int]]


@dataclass(frozen=True)
class ShowOptions(JsonOption):
    """Inspect a tokenizer: its longest tokens, its merges in order, or how a word is built up, merge by merge."""

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """File of the tokenizer."""
    longest: int = 10
    """How many of the longest tokens to print."""
    merges: int = 10
    """How many of the first merges to print, and of the last."""
    word: str | None = None
    """Text to build up instead; in the middle of a sentence a word begins with its space: --word " word"."""


@command("tokenizer show", ShowOptions)
def show_command(options: ShowOptions) -> None:
    for name, number in (("--longest", options.longest), ("--merges", options.merges)):
        if number < 0:
            raise NapkinError(f"{name} is {number}: use 0 or more")
    tokenizer = load_tokenizer(options.path)
    if options.word is not None:
        _show_word(tokenizer, options.word, options.json)
        return
    longest = longest_tokens(tokenizer, options.longest)
    merges = _chosen_merges(tokenizer, options.merges)
    if options.json:
        print_json(
            {
                **_as_dict(tokenizer),
                "longest_tokens": [_token(tokenizer, i) for i in longest],
                "merges": [_merge(tokenizer, number, merge) for number, merge in merges],
            }
        )
        return
    _print_summary(options.path, tokenizer)
    if longest:
        _print_longest(tokenizer, longest)
    if merges:
        _print_merges(tokenizer, merges)


def _is_bpe(tokenizer: Tokenizer) -> bool:
    return isinstance(tokenizer, BPETokenizer | RemappedBPETokenizer)


def _chosen_merges(tokenizer: Tokenizer, n: int) -> list[tuple[int, Merge]]:
    """The first `n` and the last `n`, with their numbers."""
    merges = list(enumerate(merges_of(tokenizer))) if _is_bpe(tokenizer) else []
    return merges if len(merges) <= 2 * n else merges[:n] + merges[len(merges) - n :]


def _print_summary(path: str, tokenizer: Tokenizer) -> None:
    parts = [f"{tokenizer.vocab_size:,} ids"]
    if _is_bpe(tokenizer):
        parts += [f"{len(merges_of(tokenizer)):,} merges", f"pattern {pattern_of(tokenizer)}"]
    say(f"{path}: {tokenizer.kind}, {', '.join(parts)}")
    special = ", ".join(f"{printable(token.encode())} {i}" for token, i in tokenizer.special_tokens.items())
    say(f"special tokens: {special or 'none'}")
    say(f"fingerprint: {tokenizer.fingerprint}")


def _print_longest(tokenizer: Tokenizer, longest: list[int]) -> None:
    tokens = [(i, tokenizer.vocabulary[i]) for i in longest]
    say()
    print_table(("id", "bytes", "longest tokens"), [(str(i), str(len(t)), _quoted(t)) for i, t in tokens], align="rrl")


def _print_merges(tokenizer: Tokenizer, merges: list[tuple[int, Merge]]) -> None:
    rows: list[tuple[str, ...]] = []
    before = -1
    for number, merge in merges:
        if number != before + 1:
            rows.append(("...",))
        first, second, merged = (_quoted(tokenizer.vocabulary[i]) for i in merge)
        rows.append((f"{number:,}", first, second, str(merge.merged), merged))
        before = number
    say()
    print_table(("merge", "joins", "", "id", "token"), rows, align="rllrl")


def _show_word(tokenizer: Tokenizer, word: str, as_json: bool) -> None:
    if not 0 < len(word) <= LONGEST_WORD:
        raise NapkinError(f"--word has {len(word):,} characters: use 1 to {LONGEST_WORD:,}")
    if not isinstance(tokenizer, BPETokenizer | RemappedBPETokenizer):
        raise NapkinError(f"a tokenizer of kind '{tokenizer.kind}' has no merges: use one of kind 'bpe'")
    split = PreTokenizer(tokenizer.pattern, tokenizer.unicode_version).split
    pieces = [(piece, list(merge_steps(tokenizer, piece))) for piece in split(word)]
    if as_json:
        print_json(
            [
                {"pre_token": piece, "steps": [_step(tokenizer, merge, ids) for merge, ids in steps]}
                for piece, steps in pieces
            ]
        )
        return
    for number, (piece, steps) in enumerate(pieces):
        if number:
            say()
        _print_steps(tokenizer, piece, steps)


def _print_steps(tokenizer: Tokenizer, piece: str, steps: list[Step]) -> None:
    merges = merges_of(tokenizer)
    rows: list[list[str | Text]] = []
    for number, ids in steps:
        joined = ["", "", ""]
        if number is not None:
            merge = merges[number]
            joined = [f"{number:,}", *(_quoted(tokenizer.vocabulary[i]) for i in (merge.first, merge.second))]
        rows.append([*joined, split_text(tokenizer, ids)])
    print_table(("merge", "joins", "", f"{_quoted(piece.encode())} becomes"), rows, align="rlll")
    ids = steps[-1][1]
    say(f"{len(ids):,} {'token' if len(ids) == 1 else 'tokens'}: {' '.join(map(str, ids))}")


def _quoted(token: bytes) -> str:
    text = printable(token)
    return f"'{text}'" if len(text) <= WIDEST else f"'{text[:WIDEST]}'..."


def _as_dict(tokenizer: Tokenizer) -> dict[str, Any]:
    pattern = {"pattern": pattern_of(tokenizer), "n_merges": len(merges_of(tokenizer))} if _is_bpe(tokenizer) else {}
    return {
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "special_tokens": tokenizer.special_tokens,
        "fingerprint": tokenizer.fingerprint,
        **pattern,
    }


def _token(tokenizer: Tokenizer, i: int) -> dict[str, Any]:
    token = tokenizer.vocabulary[i]
    return {"id": i, "bytes": len(token), "token": printable(token)}


def _merge(tokenizer: Tokenizer, number: int, merge: Merge) -> dict[str, Any]:
    tokens = [printable(tokenizer.vocabulary[i]) for i in merge]
    return {"merge": number, "ids": list(merge), "tokens": tokens}


def _step(tokenizer: Tokenizer, merge: int | None, ids: list[int]) -> dict[str, Any]:
    return {"merge": merge, "ids": ids, "tokens": [printable(tokenizer.vocabulary[i]) for i in ids]}
