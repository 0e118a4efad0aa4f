"""What could not be read, and the limits of what may be."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SetAside:
    """A document, or the rest of a file, that does not go through a pipeline because something is wrong with it."""

    identity: str
    """Of the document; of a file that could not be opened or read on, its name."""
    reason: str
    """A name from a small set, by which they are counted: `truncated`, `too large`, `broken encoding` ..."""
    detail: str = ""
    offset: int = 0
    """Bytes from the beginning of the (decompressed) file."""


class Unreadable(Exception):
    """Foreign data that cannot be read on from here."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class ReadLimits:
    """What reading a file may cost."""

    document_bytes: int = 2**25
    """Of one document, decompressed."""
    ratio: int = 300
    """Decompressed bytes of a file per compressed byte; the first 64 MiB are not counted."""
