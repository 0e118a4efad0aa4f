"""The HTML templates: values are escaped, and a missing value is an error."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

WITHOUT_CHARTS: dict[str, Any] = {"charts": None, "chart_style": "", "scripts": []}
"""What the layout of a page needs to know of charts, on a page that has none."""


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
