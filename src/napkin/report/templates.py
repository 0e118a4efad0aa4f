"""The HTML templates: values are escaped, and a missing value is an error.

The scripts of a page, each with the hash by which the Content-Security-Policy allows it and no other.
"""

import base64
import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

WITHOUT_CHARTS: dict[str, Any] = {"charts": None, "chart_style": "", "scripts": []}
"""The values that the layout of a page takes in place of charts, on a page that has none."""


def render(template: str, **values: Any) -> str:
    """Render a template of this folder. HTML allows no NUL, which texts from elsewhere may contain: it is replaced."""
    return _environment().get_template(template).render(**values).replace("\0", "\N{REPLACEMENT CHARACTER}")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    # Kept, because compiling the templates takes longer than filling them.
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


UPLOT = "vendor/uPlot-1.6.32.iife.min.js"
UPLOT_STYLE = "vendor/uPlot-1.6.32.min.css"
"""uPlot as it was released (MIT licence, vendor/LICENSE)."""


class Script(NamedTuple):
    """A script for the inside of a page."""

    text: Markup
    policy: str
    """The script's hash, as the Content-Security-Policy writes it."""


def scripts(*names: str) -> list[Script]:
    """Files of this folder as scripts, in their order."""
    digests = {text: hashlib.sha256(text.encode()).digest() for text in map(read_asset, names)}
    return [Script(text, f"'sha256-{base64.b64encode(digest).decode()}'") for text, digest in digests.items()]


@lru_cache
def read_asset(name: str) -> Markup:
    """A file of this folder, to be part of a page as it is."""
    return Markup((Path(__file__).parent / name).read_text(encoding="utf-8"))
