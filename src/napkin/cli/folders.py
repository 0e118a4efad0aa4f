"""Folders that a command makes for its results, and takes back where it fails."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from napkin.errors import NapkinError


@contextmanager
def folder_for(path: Path) -> Iterator[None]:
    """Make the folder that `path` will stand in, and those above it; where the block raises, the new ones go again.

    Raises NapkinError where it cannot be made.
    """
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NapkinError(
            f"the folder '{path.parent}' cannot be made ({error.strerror}): choose another --out"
        ) from None
    try:
        yield
    except BaseException:
        for folder in missing:
            # One that somebody has put something into meanwhile stays.
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
