"""Files that a command writes: never over an existing one, and in folders that are removed again if it fails."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from napkin.errors import NapkinError
from napkin.files import remove_abandoned


def refuse_existing(path: Path, *, option: str = "--out") -> None:
    """Raise NapkinError if there is something at `path`, which the option has named."""
    # Of a process that was killed right after it had written the file.
    remove_abandoned(path)
    if os.path.lexists(path):
        raise NapkinError(f"'{path}' exists and is not overwritten: remove it or choose another {option}")


@contextmanager
def folder_for(path: Path) -> Iterator[None]:
    """Make the parent folders of `path`; if the block raises, those that were made are removed again.

    Raises NapkinError if they cannot be made.
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
            # One that another program has written into meanwhile stays.
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
