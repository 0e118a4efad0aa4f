"""A document on its way from a raw page to a corpus: its text, where it comes from, and what each stage did to it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class TraceEntry:
    """What one stage did to a record; `dropped` says why the record ended there, and is empty where it went on."""

    stage: str
    note: str = ""
    dropped: str = ""


@dataclass(slots=True)
class Record:
    """A document with its provenance.

    `identity` is unique in a pipeline and the same in every run of it: the name of the input, `#`, and the document's
    number in it. `content` is what was read before a stage made text of it (an HTML page, a PDF), empty afterwards.
    `fields` holds what stages found (language, scores) and what the input said of the document, as JSON values.
    """

    identity: str
    text: str = ""
    content: bytes = b""
    media_type: str = "text/plain"
    source: str = ""
    """The file that it was read from, as the user named it."""
    offset: int = 0
    """Bytes from the beginning of the (decompressed) file to the document."""
    address: str = ""
    """Where the document was published (a URL), if known."""
    licence: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    trace: list[TraceEntry] = field(default_factory=list)
