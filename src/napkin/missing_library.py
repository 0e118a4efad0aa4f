"""The libraries of the extras `curation` and `ray`, imported where they are used."""

import importlib
import importlib.util
from types import ModuleType

from napkin.errors import NapkinError

CURATION_LIBRARIES = ("fastwarc", "fsspec", "pyarrow", "pypdfium2", "resiliparse", "zstandard")


def import_extra(name: str, purpose: str) -> ModuleType:
    """Import a library of an extra.

    Raises NapkinError where it is not installed, with what it is needed for, and the others of its extra that are
    missing too.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        library = name.partition(".")[0]
        others = CURATION_LIBRARIES if library in CURATION_LIBRARIES else ()
        missing = [library, *(each for each in others if each != library and importlib.util.find_spec(each) is None)]
        raise NapkinError(f"{purpose} needs {library}: pip install {' '.join(missing)}") from None


def zstandard() -> ModuleType:
    """The library for zstd."""
    return import_extra("zstandard", "a zstd file")
