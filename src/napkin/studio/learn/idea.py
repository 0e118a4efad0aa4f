"""A page of an idea: its texts, and the function that answers its requests."""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

import msgspec


@dataclass(frozen=True)
class Idea:
    """One idea: its texts, and the function that answers the page's controls."""

    name: str
    """The last part of the page's address, and of the name of its script."""
    title: str
    summary: str
    """One sentence for the index."""
    text: tuple[str, ...]
    """Paragraphs in plain sentences."""
    formula: str
    command: str
    """A command that shows the same."""
    files: tuple[str, ...]
    """The files with the code, in the order in which to read them."""
    request: type[msgspec.Struct]
    """The type of the page's request: the values of its controls, with bounds."""
    answer: Callable[[Any], dict[str, Any]]

    def page(self, template: str) -> str:
        """The page, its texts put into a template."""
        values = {
            "name": escape(self.name),
            "title": escape(self.title),
            "text": "\n".join(f"<p>{escape(each)}</p>" for each in self.text),
            "formula": escape(self.formula),
            "command": escape(self.command),
            "files": "\n".join(f"<li><code>src/napkin/{escape(each)}</code></li>" for each in self.files),
        }
        for name, value in values.items():
            template = template.replace(f"{{{name}}}", value)
        return template

    @property
    def tile(self) -> str:
        """The page's entry in the index."""
        return (
            f'<li><a href="/learn/{escape(self.name)}"><b>{escape(self.title)}</b>'
            f'<span class="soft">{escape(self.summary)}</span></a></li>'
        )
