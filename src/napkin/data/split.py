"""Splitting documents into training and validation, by a hash of each document's text."""

import itertools
from collections.abc import Iterable, Iterator
from typing import AnyStr, Literal

from napkin.data.document import Document
from napkin.data.file_sections import has_text
from napkin.errors import NapkinError

Side = Literal["training", "validation"]


def split_documents(documents: Iterable[Document], fraction: float, side: Side) -> Iterator[Document]:
    """The documents of one side; see `split_into_sides`."""
    return (document for each, document in split_into_sides(documents, fraction) if each == side)


def split_into_sides(documents: Iterable[Document], fraction: float) -> Iterator[tuple[Side, Document]]:
    """Each document with its side; `fraction` (0 to 1) of them are held out for validation, see `is_validation`.

    A single document is cut in two instead: about the last `fraction` of it is held out, from the beginning of a nearby
    line or word if there is one. The same is done with each part of a document that comes in parts; the two halves of a
    part are then documents. Halves of only white space are dropped. Memory is that of two documents, or parts.

    Raises NapkinError if the fraction is out of range.
    """
    _check_fraction(fraction)
    first = True
    # The following one tells whether a document comes in parts, or is the only one.
    for document, following in itertools.pairwise(itertools.chain(documents, [None])):
        assert document is not None
        alone = first and following is None
        in_parts = document.continues or (following is not None and following.continues)
        first = False
        if (alone or in_parts) and 0 < fraction < 1:
            for side, half in _cut(document, fraction):
                if has_text(half.data):
                    yield side, half
        else:
            yield "validation" if is_validation(document, fraction) else "training", document


def is_validation(document: Document, fraction: float) -> bool:
    """Whether `document` belongs to the held-out `fraction` (0 to 1) of all documents, by a hash of its text.

    So the same text is never on both sides, whatever its name and however often it occurs; the order, the machine and
    the other documents do not matter; and a larger fraction holds out everything that a smaller one does.
    """
    _check_fraction(fraction)
    return int.from_bytes(document.digest, "little") < fraction * 2**64


def _cut(document: Document, fraction: float) -> Iterator[tuple[Side, Document]]:
    data = document.data
    if data.isascii():
        middle = _middle(data, fraction, (b"\n", b" "))
    else:
        # The fraction is one of characters.
        text = document.text
        middle = len(text[: _middle(text, fraction, ("\n", " "))].encode())
    yield "training", Document(f"{document.name} (training)", data=data[:middle])
    yield "validation", Document(f"{document.name} (validation)", data=data[middle:])


def _middle(text: AnyStr, fraction: float, boundaries: tuple[AnyStr, AnyStr]) -> int:
    middle = round(len(text) * (1 - fraction))
    # A text may be one very long line after a short one: a boundary too far back would leave one side almost empty.
    nearby = max(0, middle - min(middle, len(text) - middle) // 2)
    for boundary in boundaries:
        if (found := text.rfind(boundary, nearby, middle)) >= 0:
            return found + 1
    return middle


def _check_fraction(fraction: float) -> None:
    if not 0 <= fraction <= 1:
        raise NapkinError(f"a validation fraction of {fraction} is not possible: choose from 0 to 1")
