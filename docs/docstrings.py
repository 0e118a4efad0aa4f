"""How docstrings become Markdown: the examples in them, which are doctests, are blocks of code."""

from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Puts a fence around each doctest that a docstring holds, so that `>>>` is not read as a quotation."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of each object that was parsed."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with each doctest, from its first `>>>` to the next empty line, as a block of code; `::` is a colon."""
    paragraphs = text.replace("::\n\n", ":\n\n").split("\n\n")
    for index, paragraph in enumerate(paragraphs):
        lines = paragraph.split("\n")
        first = next((i for i, line in enumerate(lines) if line.lstrip().startswith(">>> ")), None)
        if first is not None:
            margin = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
            lines[first:] = ["", f"{margin}```pycon", *lines[first:], f"{margin}```"]
            paragraphs[index] = "\n".join(lines)
    return "\n\n".join(paragraphs)
