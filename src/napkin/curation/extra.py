"""The libraries of the extras `curation` and `ray`, imported where they are used."""

import importlib
from types import ModuleType

from napkin.errors import NapkinError


def import_extra(name: str, purpose: str, extra: str = "curation") -> ModuleType:
    """Import a library of an extra. Raises NapkinError, with what it is needed for, where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        library = name.partition(".")[0]
        raise NapkinError(f"{purpose} needs {library}: pip install 'napkin-lm[{extra}]'") from None


def zstandard() -> ModuleType:
    """The library for zstd."""
    return import_extra("zstandard", "a zstd file")
