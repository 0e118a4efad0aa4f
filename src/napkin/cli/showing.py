"""What `napkin tokenizer show` does."""

from typing import Any

from rich.table import Table
from rich.text import Text

from napkin.cli.terminal import out, print_json, say
from napkin.cli.token_text import cut_text
from napkin.cli.tokenizer import ShowOptions
from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.inspection import Merge, longest_tokens, merge_steps, merges_of, pattern_of
from napkin.tokenizer.pre_tokenization import PreTokenizer
from napkin.tokenizer.printable import printable
from napkin.tokenizer.remapped_bpe import RemappedBPETokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer

LONGEST_WORD = 1000
WIDEST = 40

Step = tuple[int | None, list[int]]


def show(options: ShowOptions) -> None:
    """Print what is inside a tokenizer, or how a word is built up."""
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
                **_described(tokenizer),
                "longest_tokens": [_token(tokenizer, i) for i in longest],
                "merges": [_merge(tokenizer, number, merge) for number, merge in merges],
            }
        )
        return
    _say_what_it_is(options.path, tokenizer)
    if longest:
        _print_longest(tokenizer, longest)
    if merges:
        _print_merges(tokenizer, merges)


def _is_bpe(tokenizer: Tokenizer) -> bool:
    return isinstance(tokenizer, BPETokenizer | RemappedBPETokenizer)


def _chosen_merges(tokenizer: Tokenizer, n: int) -> list[tuple[int, Merge]]:
    """The first and the last `n`, with their numbers."""
    merges = list(enumerate(merges_of(tokenizer))) if _is_bpe(tokenizer) else []
    return merges if len(merges) <= 2 * n else merges[:n] + merges[len(merges) - n :]


def _say_what_it_is(path: str, tokenizer: Tokenizer) -> None:
    parts = [f"{tokenizer.vocab_size:,} ids"]
    if _is_bpe(tokenizer):
        parts += [f"{len(merges_of(tokenizer)):,} merges", f"pattern {pattern_of(tokenizer)}"]
    say(f"{path}: {tokenizer.kind}, {', '.join(parts)}")
    special = ", ".join(f"{printable(token.encode())} {i}" for token, i in tokenizer.special_tokens.items())
    say(f"special tokens: {special or 'none'}")
    say(f"fingerprint: {tokenizer.fingerprint}")


def _print_longest(tokenizer: Tokenizer, longest: list[int]) -> None:
    table = Table("id", "bytes", "longest tokens", box=None, header_style="bold")
    table.columns[0].justify = table.columns[1].justify = "right"
    for i in longest:
        token = tokenizer.vocabulary[i]
        table.add_row(str(i), str(len(token)), _quoted(token))
    say("")
    out.print(table)


def _print_merges(tokenizer: Tokenizer, merges: list[tuple[int, Merge]]) -> None:
    table = Table("merge", "joins", "", "id", "token", box=None, header_style="bold")
    table.columns[0].justify = table.columns[3].justify = "right"
    before = -1
    for number, merge in merges:
        if number != before + 1:
            table.add_row("...")
        first, second, merged = (_quoted(tokenizer.vocabulary[i]) for i in merge)
        table.add_row(f"{number:,}", first, second, str(merge.merged), merged)
        before = number
    say("")
    out.print(table)


def _show_word(tokenizer: Tokenizer, word: str, as_json: bool) -> None:
    if not 0 < len(word) <= LONGEST_WORD:
        raise NapkinError(f"--word has {len(word):,} characters: use 1 to {LONGEST_WORD:,}")
    if not isinstance(tokenizer, BPETokenizer | RemappedBPETokenizer):
        raise NapkinError(f"a tokenizer of kind '{tokenizer.kind}' builds nothing up: use one of kind 'bpe'")
    pieces = [(piece, list(merge_steps(tokenizer, piece))) for piece in PreTokenizer(tokenizer.pattern).split(word)]
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
            say("")
        _print_steps(tokenizer, piece, steps)


def _print_steps(tokenizer: Tokenizer, piece: str, steps: list[Step]) -> None:
    merges = merges_of(tokenizer)
    table = Table("merge", "joins", "", f"{_quoted(piece.encode())} becomes", box=None, header_style="bold")
    table.columns[0].justify = "right"
    for number, ids in steps:
        joined: list[str | Text] = ["", "", ""]
        if number is not None:
            merge = merges[number]
            joined = [f"{number:,}", *(_quoted(tokenizer.vocabulary[i]) for i in (merge.first, merge.second))]
        table.add_row(*joined, cut_text(tokenizer, ids))
    out.print(table)
    ids = steps[-1][1]
    say(f"{len(ids):,} {'token' if len(ids) == 1 else 'tokens'}: {' '.join(map(str, ids))}")


def _quoted(token: bytes) -> str:
    text = printable(token)
    return f"'{text}'" if len(text) <= WIDEST else f"'{text[:WIDEST]}'..."


def _described(tokenizer: Tokenizer) -> dict[str, Any]:
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
