"""Text split into tokens: coloured on a terminal, elsewhere with a mark between tokens."""

from collections.abc import Iterable

from rich.cells import cell_len
from rich.text import Text

from napkin.cli.common.terminal import out, print_rich
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.inspection import printable

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
