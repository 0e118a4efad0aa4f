"""A conversation's tokens as text: what is learned is coloured on a terminal, and elsewhere between marks."""

from itertools import groupby

from rich.text import Text

from napkin.chats.token_sequence import TokenSequence
from napkin.cli.terminal import out
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.inspection import printable
from napkin.tokenizer.text_input import split_at

LEARNED_BEGINS, LEARNED_ENDS = "{+", "+}"
_LEARNED, _NOT_LEARNED, _SPECIAL = "black on bright_green", "", "bold"


def learned_text(tokenizer: Tokenizer, sequence: TokenSequence) -> Text:
    """The text that a sequence's tokens stand for.

    Characters that do not print are escapes. Where ordinary text is that of a special token, a backslash is before it.
    """
    special = set(tokenizer.special_tokens.values())
    text, coloured = Text(), is_coloured()
    pairs = zip(sequence.tokens.tolist(), sequence.counts.tolist(), strict=True)
    for counts, stretch in groupby(pairs, key=lambda pair: pair[1]):
        style = _LEARNED if counts else _NOT_LEARNED
        text.append("" if coloured or not counts else LEARNED_BEGINS)
        for is_special, run in groupby((token for token, _ in stretch), key=lambda token: token in special):
            data = b"".join(tokenizer.vocabulary[token] for token in run)
            shown = printable(data) if is_special else _with_backslashes(printable(data), tokenizer)
            # A line of the text is a line here.
            text.append(shown.replace("↵", "↵\n"), f"{style} {_SPECIAL}".strip() if is_special else style)
        text.append("" if coloured or not counts else LEARNED_ENDS)
    return text


def is_coloured() -> bool:
    """Whether standard output shows colours."""
    return out.color_system is not None and not out.no_color


def _with_backslashes(text: str, tokenizer: Tokenizer) -> str:
    parts = split_at(text, tokenizer.special_tokens)
    return "".join(f"\\{part}" if number % 2 else part for number, part in enumerate(parts))
