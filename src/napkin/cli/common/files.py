"""Files and folders that commands read and write: TEXT arguments, new files, a run's report.

A new file never replaces an existing one, and folders made for it are removed again if the command fails.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from napkin.data.corpus import Document, read_documents, standard_library
from napkin.errors import NapkinError
from napkin.files import remove_abandoned


def refuse_existing(path: Path, *, option: str = "--out") -> None:
    """Raise NapkinError if there is something at `path`, which the option has named."""
    # A temporary file whose process was killed right after it had written the file.
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
            # A folder that another program has written into meanwhile stays.
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


STANDARD_LIBRARY = "stdlib:"
PART_BYTES = 2**23


def open_documents(
    texts: Sequence[str],
    suffixes: Sequence[str] = (),
    part_bytes: int | None = PART_BYTES,
    on_inline: Callable[[Path], None] | None = None,
) -> Iterator[Document]:
    """The documents of every TEXT in turn, those larger than `part_bytes` in parts; `on_inline` as `read_documents`."""
    for text in texts:
        if not text:
            raise NapkinError("a TEXT is empty: name a file, a folder, or stdlib:")
        if text == STANDARD_LIBRARY:
            yield from standard_library()
        else:
            yield from read_documents(
                [Path(text)], suffixes=suffixes or None, part_bytes=part_bytes, on_inline=on_inline
            )


def renew_report(run: Path) -> None:
    """Write a run's report.html with what the folder holds by now; best done after the result has been printed."""
    from napkin.report.page import write_report
    from napkin.runs.run_folder import is_being_trained, is_quantized

    if is_quantized(run):
        return  # It has no training to report.
    write_report(run, training=is_being_trained(run))
