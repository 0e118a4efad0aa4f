"""The texts of `napkin tokenizer train` and `encode`, split into training and validation; and how tokens are shown:
in colours on a terminal, elsewhere with marks between them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.cells import cell_len
from rich.text import Text

from napkin.cli.common.files import PART_BYTES, open_documents
from napkin.cli.common.terminal import out, print_rich
from napkin.data.corpus import Side, divide_inline, split_into_sides
from napkin.data.curated_corpus import Document
from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.inspection import printable
from napkin.tokenizer.word_level import UNK, UnknownRate


@dataclass(frozen=True)
class TextOptions:
    """Which texts, and how they are split."""

    texts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT...")] = ()
    """Where the text is; at least one."""
    suffixes: tuple[str, ...] = ()
    """In folders, read only files that end so: --suffixes .py .md; none is all files."""
    validation_fraction: float = 0.05
    """Fraction of the documents, 0 to 1, that is held out for validation, chosen by a hash of each; of a single
    document, its last part; of one larger than 8 MB, the last part of each 8 MB. Give `train` and `encode` the same;
    0 holds nothing out and makes no validation.tokens."""


def require_texts(options: TextOptions, command: str) -> None:
    """Raise NapkinError if there are none."""
    if not options.texts:
        raise NapkinError(
            f"no TEXT is given: name a file, a folder, or stdlib: as in `napkin tokenizer {command} stdlib:`"
        )


def read_side(options: TextOptions, side: Side) -> Iterator[Document]:
    """The documents of one side of the split; raises NapkinError if there are none."""
    return (document for each, document in read_sides(options, [side]) if each == side)


def read_sides(
    options: TextOptions,
    sides: Sequence[Side],
    part_bytes: int | None = PART_BYTES,
    *,
    inline_boundaries: bool = False,
    on_inline: Callable[[Path], None] | None = None,
) -> Iterator[tuple[Side, Document]]:
    """The documents with the side of the split that each is on; raises NapkinError if one of `sides` has none.

    With `inline_boundaries` they are divided by `divide_inline`; `on_inline` as `read_documents`.
    """
    fraction = options.validation_fraction
    missing = set(sides)
    documents = open_documents(options.texts, options.suffixes, part_bytes, on_inline)
    if inline_boundaries:
        documents = divide_inline(documents)
    for side, document in split_into_sides(documents, fraction):
        missing.discard(side)
        yield side, document
    for side in sides:
        if side in missing:
            raise NapkinError(
                f"--validation-fraction {fraction} leaves no text for {side}: "
                "use more text, another fraction, or 0 to hold nothing out"
            )


def describe_unknown_words(cost: UnknownRate) -> str:
    """The fraction of the tokens that are UNK, and the fraction of the bytes that they lose."""
    return f"{cost.tokens:.1%} of the tokens are {UNK}, and {cost.bytes:.1%} of the bytes are lost in them"


MARK = "|"
COLOURS = ("black on bright_cyan", "black on bright_yellow", "black on bright_green", "black on bright_magenta")
UNKNOWN = "bold bright_white on red"


def print_tokens(tokenizer: Tokenizer, ids: Iterable[int], *, more: bool = False) -> None:
    """Print the text that the ids stand for; with `more`, an ellipsis says that the text continues."""
    print_rich(split_text(tokenizer, ids, more=more), wrap=_is_coloured())


def split_text(tokenizer: Tokenizer, ids: Iterable[int], *, more: bool = False) -> Text:
    """The text that the ids stand for, each token in a colour, or with marks between tokens."""
    pieces = [(printable(tokenizer.vocabulary[i]), i == tokenizer.unknown_id) for i in ids]
    if not _is_coloured():
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


def _is_coloured() -> bool:
    return out.color_system is not None and not out.no_color
