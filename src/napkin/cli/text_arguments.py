"""The TEXT arguments of commands: files, folders, or `stdlib:`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from napkin.data.corpus import read_documents, standard_library
from napkin.data.curated_corpus import Document
from napkin.errors import NapkinError

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
