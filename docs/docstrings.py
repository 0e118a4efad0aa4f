"""The step between docstrings and pages: what the site's builder loads as an extension of griffe."""

from typing import Any

import griffe

from build_site import in_markdown


class Doctests(griffe.Extension):
    """Rewrites docstrings as Markdown, in which `>>>` would be a quotation."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object that was parsed."""
        if obj.docstring:
            obj.docstring.value = in_markdown(obj.docstring.value)
