"""`napkin tokenizer compare` and `show`: how texts are split, coloured on a terminal, elsewhere with marks between."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.cells import cell_len
from rich.text import Text

from napkin.cli.common.files import STANDARD_LIBRARY, open_documents
from napkin.cli.common.options import JsonOption, Switch, command
from napkin.cli.common.progress import ProgressLine, progress_line
from napkin.cli.common.terminal import is_coloured, out, print_json, print_rich, print_table, say
from napkin.cli.tokenizer.making import describe_unknown_words
from napkin.errors import NapkinError
from napkin.hardware.host import usable_cores
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import BPETokenizer, ByteTokenizer, RemappedBPETokenizer
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.inspection import (
    Merge,
    compare_tokenizers,
    longest_tokens,
    merge_steps,
    merges_of,
    pattern_of,
    printable,
)
from napkin.tokenizer.pre_tokenization import PreTokenizer
from napkin.tokenizer.text_input import utf8
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.tokenizer.word_level import CharacterTokenizer, WordTokenizer
from napkin.units import format_bytes

MOST_CHARACTERS = 10**6
MOST_SHOWN = 10_000


@dataclass(frozen=True)
class CompareOptions(JsonOption):
    """Show how each kind of tokenizer encodes a text. Characters, words and byte-level BPE learn their vocabulary
    first: from the text itself if it is in files, from Python's own library if it is given on the command line."""

    text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    """A file, a folder, stdlib: for Python's own library, or else the text itself. Its first million characters are
    used."""
    literal: Switch = False
    """TEXT is the text itself, even if it could be the name of a file."""
    with_: Annotated[tuple[str, ...], tyro.conf.arg(name="with")] = ()
    """Files of tokenizers to compare with."""
    learn_from: tuple[str, ...] = ()
    """Files, folders or stdlib: to learn the vocabularies from instead."""
    vocab_size: int = 4096
    """Number of token ids of words and of byte-level BPE."""
    show: int = 240
    """Number of characters of the text that are shown split into tokens."""


@command("tokenizer compare", CompareOptions)
def compare_command(options: CompareOptions) -> None:
    if not 0 <= options.show <= MOST_SHOWN:
        raise NapkinError(f"--show is {options.show}: use 0 to {MOST_SHOWN:,} characters")
    saved = [(path, load_tokenizer(path)) for path in options.with_]
    with progress_line("reading the text") as line:
        text, source = _text(options.text, literal=options.literal)
        learned_from = options.learn_from or ((source,) if source else (STANDARD_LIBRARY,))
        learned = text if learned_from == (source,) else _beginning(learned_from)
        kinds = _kinds(text, learned, options.vocab_size, line)
        line.retitle("encoding")
        results, refused = compare_tokenizers([*kinds, *saved], text)
    text_bytes, excerpt = len(utf8(text)), _excerpt(text, options.show)
    # Lone surrogates may be in a str, but no encoding has them.
    wide_bytes = {name: len(text.encode(f"{name}-le", "surrogatepass")) for name in ("utf-16", "utf-32")}
    if options.json:
        described = {"text": source or None, "characters": len(text), "bytes": text_bytes, "learned_from": learned_from}
        described |= {f"{name.replace('-', '')}_bytes": size for name, size in wide_bytes.items()}
        rows = [result.as_values(excerpt) for result in results]
        print_json({**described, "tokenizers": rows, "refused": refused})
        return
    name = source or "given on the command line"
    learned_name = "itself" if learned is text else f"{format_bytes(len(utf8(learned)))} of {', '.join(learned_from)}"
    wide = ", ".join(f"{format_bytes(size)} in {name.upper()}" for name, size in wide_bytes.items())
    say(f"text: {name}, {len(text):,} characters, {format_bytes(text_bytes)} in UTF-8, {wide}")
    say(f"vocabularies learned from {learned_name}")
    rows = [
        (
            result.name,
            f"{result.tokenizer.vocab_size:,}",
            f"{len(result.ids):,}",
            f"{result.bytes_per_token:.3f}",
            f"{format_bytes(result.bytes_per_second)}/s",
        )
        for result in results
    ]
    print_table(("tokenizer", "vocabulary", "tokens", "bytes per token", "bytes per second"), rows)
    for result in results:
        if result.lost.tokens:
            say(f"{result.name}: {describe_unknown_words(result.lost)}, so the ratio does not compare with the others")
    for name, reason in refused.items():
        say(f"{name}: {reason}")
    for result in results if excerpt else []:
        say()
        say(result.name, style="bold")
        print_tokens(result.tokenizer, result.tokenizer.encode(excerpt), more=len(excerpt) < len(text))


def _text(given: str, *, literal: bool) -> tuple[str, str]:
    """The text and its source: a name, or "" if the text itself was given."""
    if not given:
        raise NapkinError("TEXT is empty: name a file, a folder or stdlib:, or give a text")
    if not literal and (given == STANDARD_LIBRARY or _exists(given)):
        return _beginning([given]), given
    if not literal and _FILE_NAME.fullmatch(given):
        raise NapkinError(
            f"'{given}' does not exist: name a file, a folder or stdlib:; or add --literal if that is the text itself"
        )
    return given[:MOST_CHARACTERS], ""


_FILE_NAME = re.compile(r"\S*/\S*|\S+\.[A-Za-z][A-Za-z0-9]{0,9}")
"""A word with a slash, or with a suffix: more likely a misspelt file than a text."""


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        # A text may be too long for a path, or contain a NUL.
        return False


def _beginning(texts: Sequence[str]) -> str:
    parts: list[str] = []
    left = MOST_CHARACTERS
    for document in open_documents(texts):
        parts.append(document.text[:left])
        left -= len(parts[-1])
        if not left:
            break
    return "".join(parts)


def _kinds(text: str, learned: str, vocab_size: int, line: ProgressLine) -> Iterator[tuple[str, Tokenizer]]:
    from napkin.data.token_file import SEPARATOR

    yield "characters", CharacterTokenizer.train([learned, text], [SEPARATOR])
    yield "bytes", ByteTokenizer([SEPARATOR])
    line.retitle("learning words")
    yield "words", WordTokenizer.train([learned], vocab_size, [SEPARATOR])
    line.retitle("learning merges")
    yield (
        "byte-level BPE",
        train_bpe(
            [learned],
            vocab_size,
            [SEPARATOR],
            progress=lambda stage, done, total: line(done, total),
            threads=usable_cores(),
        ),
    )


def _excerpt(text: str, n_characters: int) -> str:
    """The beginning of the text, up to the end of a word if possible."""
    if len(text) <= n_characters:
        return text
    beginning = text[:n_characters]
    words = beginning.rstrip().rpartition(" ")[0]
    return words if len(words) > n_characters // 2 else beginning


LONGEST_WORD = 1000
WIDEST = 40


@dataclass(frozen=True)
class ShowOptions(JsonOption):
    """Inspect a tokenizer: its longest tokens, its merges in order, or how a word is built up, merge by merge."""

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """File of the tokenizer."""
    longest: int = 10
    """Number of longest tokens to print."""
    merges: int = 10
    """Number of first merges to print, and of last ones."""
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
    all_merges, n = list(enumerate(merges_of(tokenizer))) if _is_bpe(tokenizer) else [], options.merges
    merges = all_merges if len(all_merges) <= 2 * n else [*all_merges[:n], *all_merges[len(all_merges) - n :]]
    if options.json:
        about = {name: getattr(tokenizer, name) for name in ("kind", "vocab_size", "special_tokens", "fingerprint")}
        if _is_bpe(tokenizer):
            about |= {"pattern": pattern_of(tokenizer), "n_merges": len(merges_of(tokenizer))}
        tokens = [(i, tokenizer.vocabulary[i]) for i in longest]
        about["longest_tokens"] = [{"id": i, "bytes": len(token), "token": printable(token)} for i, token in tokens]
        about["merges"] = [
            {"merge": number, "ids": list(merge), "tokens": _texts(tokenizer, merge)} for number, merge in merges
        ]
        print_json(about)
        return
    parts = [f"{tokenizer.vocab_size:,} ids"]
    if _is_bpe(tokenizer):
        parts += [f"{len(merges_of(tokenizer)):,} merges", f"pattern {pattern_of(tokenizer)}"]
    say(f"{options.path}: {tokenizer.kind}, {', '.join(parts)}")
    special = ", ".join(f"{printable(token.encode())} {i}" for token, i in tokenizer.special_tokens.items())
    say(f"special tokens: {special or 'none'}")
    say(f"fingerprint: {tokenizer.fingerprint}")
    if longest:
        say()
        rows = [(str(i), str(len(tokenizer.vocabulary[i])), _quoted(tokenizer.vocabulary[i])) for i in longest]
        print_table(("id", "bytes", "longest tokens"), rows, align="rrl")
    if merges:
        _print_merges(tokenizer, merges)


def _texts(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    return [printable(tokenizer.vocabulary[i]) for i in ids]


def _is_bpe(tokenizer: Tokenizer) -> bool:
    return isinstance(tokenizer, BPETokenizer | RemappedBPETokenizer)


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
                {
                    "pre_token": piece,
                    "steps": [{"merge": merge, "ids": ids, "tokens": _texts(tokenizer, ids)} for merge, ids in steps],
                }
                for piece, steps in pieces
            ]
        )
        return
    merges = merges_of(tokenizer)
    for position, (piece, steps) in enumerate(pieces):
        if position:
            say()
        rows: list[list[str | Text]] = []
        for number, ids in steps:
            joined = ["", "", ""]
            if number is not None:
                first, second, _ = merges[number]
                joined = [f"{number:,}", *(_quoted(tokenizer.vocabulary[i]) for i in (first, second))]
            rows.append([*joined, split_text(tokenizer, ids)])
        print_table(("merge", "joins", "", f"{_quoted(piece.encode())} becomes"), rows, align="rlll")
        ids = steps[-1][1]
        say(f"{len(ids):,} {'token' if len(ids) == 1 else 'tokens'}: {' '.join(map(str, ids))}")


def _quoted(token: bytes) -> str:
    text = printable(token)
    return f"'{text}'" if len(text) <= WIDEST else f"'{text[:WIDEST]}'..."


MARK = "|"
COLOURS = ("black on bright_cyan", "black on bright_yellow", "black on bright_green", "black on bright_magenta")
UNKNOWN = "bold bright_white on red"


def print_tokens(tokenizer: Tokenizer, ids: Iterable[int], *, more: bool = False) -> None:
    """Print the text that the ids stand for; with `more`, an ellipsis says that the text continues."""
    print_rich(split_text(tokenizer, ids, more=more), wrap=is_coloured())


def split_text(tokenizer: Tokenizer, ids: Iterable[int], *, more: bool = False) -> Text:
    """The text that the ids stand for, each token in a colour, or with marks between tokens."""
    pieces = [(printable(tokenizer.vocabulary[i]), i == tokenizer.unknown_id) for i in ids]
    if not is_coloured():
        return Text(_marked([piece for piece, _ in pieces] + ["..."] * more))
    text = Text(no_wrap=True)
    column = 0
    for number, (piece, is_unknown) in enumerate(pieces):
        style = UNKNOWN if is_unknown else COLOURS[number % len(COLOURS)]
        run = ""
        for character in piece:
            # Wrapped at any character: rich wraps at words, and drops the space there, which belongs to a token.
            if column + cell_len(character) > out.width:
                text.append(run, style).append("\n")
                run, column = "", 0
            run += character
            column += cell_len(character)
        text.append(run, style)
    return text.append(" ..." if more else "")


def _marked(pieces: list[str]) -> str:
    """The pieces with marks between them; on a terminal, in lines that end at a mark where one fits."""
    if not out.is_terminal:
        return MARK.join(pieces)
    lines = [""]
    for i, piece in enumerate(pieces):
        marked = piece + MARK * (i + 1 < len(pieces))
        if lines[-1] and cell_len(lines[-1] + marked) > out.width:
            lines.append("")
        lines[-1] += marked
    return "\n".join(lines)
