"""Which documents are held out for validation: decided by each document's text alone."""

import itertools
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Literal

from napkin.data.corpus import Document
from napkin.errors import NapkinError
from napkin.tokenizer.texts import utf8


def split_documents(
    documents: Iterable[Document], fraction: float, side: Literal["training", "validation"]
) -> Iterator[Document]:
    """The documents of one side; `fraction` (0 to 1) of all are held out, as `is_validation` says.

    A text that is a single document is cut instead: about the last `fraction` of it is held out, from the beginning of
    a line or a word where there is one nearby. So is each part of a document that comes in parts, and what is left of a
    part is a document. A side that would get nothing but white space has no document. Memory stays that of two
    documents, or parts.

    Raises NapkinError where the fraction is not possible.
    """
    _refuse_impossible(fraction)
    first = True
    # The one behind tells whether a document comes in parts, or is alone.
    for document, following in itertools.pairwise(itertools.chain(documents, [None])):
        assert document is not None
        alone = first and following is None
        in_parts = document.continues or (following is not None and following.continues)
        first = False
        if (alone or in_parts) and 0 < fraction < 1:
            part = _cut(document, fraction, side)
            if part.text.strip():
                yield part
        elif is_validation(document, fraction) == (side == "validation"):
            yield document


def is_validation(document: Document, fraction: float) -> bool:
    """Tell whether `document` belongs to the held-out `fraction` (0 to 1) of all documents.

    A hash of the text decides. So the same text never stands on both sides, whatever it is called and however
    often it occurs; neither the order, the machine nor the other documents matter; and what a small fraction
    holds out, a larger one holds out too.
    """
    _refuse_impossible(fraction)
    digest = blake2b(utf8(document.text, f"'{document.name}'"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def _cut(document: Document, fraction: float, side: Literal["training", "validation"]) -> Document:
    text = document.text
    middle = _middle(text, fraction)
    return Document(f"{document.name} ({side})", text[:middle] if side == "training" else text[middle:])


def _middle(text: str, fraction: float) -> int:
    middle = round(len(text) * (1 - fraction))
    # A text may be one endless line after a short one: a boundary too far back would leave one side next to nothing.
    nearby = max(0, middle - min(middle, len(text) - middle) // 2)
    for boundary in ("\n", " "):
        if (found := text.rfind(boundary, nearby, middle)) >= 0:
            return found + 1
    return middle


def _refuse_impossible(fraction: float) -> None:
    if not 0 <= fraction <= 1:
        raise NapkinError(f"a validation fraction of {fraction} is not possible: choose from 0 to 1")
