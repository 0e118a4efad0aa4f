"""Which documents are held out for validation: decided by each document's text alone."""

from hashlib import blake2b

from napkin.data.corpus import Document
from napkin.errors import NapkinError
from napkin.tokenizer.texts import utf8


def is_validation(document: Document, fraction: float) -> bool:
    """Tell whether `document` belongs to the held-out `fraction` (0 to 1) of all documents.

    A hash of the text decides. So the same text never stands on both sides, whatever it is called and however
    often it occurs; neither the order, the machine nor the other documents matter; and what a small fraction
    holds out, a larger one holds out too.
    """
    if not 0 <= fraction <= 1:
        raise NapkinError(f"a validation fraction of {fraction} is not possible: choose from 0 to 1")
    digest = blake2b(utf8(document.text, f"'{document.name}'"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64
