"""The libraries of the extra `curation`, imported where they are used."""

import importlib
from types import ModuleType

from napkin.errors import NapkinError


def import_library(name: str) -> ModuleType:
    """The module `name`; NapkinError if its library is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        library = name.partition(".")[0]
        raise NapkinError(f"extraction needs {library}: pip install 'napkin-lm[curation]'") from None
