"""The text of a PDF, read by pdfium in a process of its own, with limits: it is C++ that is fed by strangers."""

import json
import sys
from dataclasses import dataclass
from typing import Any

from napkin.child_process import run_program
from napkin.curation.extra import import_extra
from napkin.curation.extraction.not_extracted import NotExtracted
from napkin.curation.extraction.pdf_lines import join_pages

# Standard input is the document, the argument the limits; see pdf_reader.py.
_PROCESS = "import sys; from napkin.curation.extraction.pdf_reader import main; main(sys.argv[1])"


@dataclass(frozen=True)
class PdfLimits:
    """What is read at most of one document, and what its process may take."""

    most_bytes: int = 200_000_000
    most_pages: int = 5_000
    most_characters: int = 50_000_000
    most_seconds: float = 60.0
    most_memory: int = 4_000_000_000
    """Bytes of address space, where the system can limit it."""


@dataclass(frozen=True)
class ExtractedPdf:
    """The text of a PDF, its title if it has one, and how many pages it has."""

    text: str
    title: str
    pages: int


def extract_pdf(data: bytes, *, limits: PdfLimits = PdfLimits()) -> ExtractedPdf:
    """The text of a PDF in the order in which pdfium reads it.

    Lines become paragraphs, words divided at the end of a line are joined, and the first and last lines that pages
    repeat are left out. Raises NotExtracted for a document that is over a limit or cannot be read, NapkinError where
    the extra `curation` is not installed.
    """
    if len(data) > limits.most_bytes:
        raise NotExtracted("PDF bytes", f"{len(data):,} > {limits.most_bytes:,}")
    import_extra("pypdfium2", "a PDF")
    answer = _read_in_child(data, limits)
    if "rule" in answer:
        raise NotExtracted(answer["rule"], answer["detail"])
    return ExtractedPdf(join_pages(answer["pages"]), answer["title"], len(answer["pages"]))


def _read_in_child(data: bytes, limits: PdfLimits) -> dict[str, Any]:
    told = json.dumps(
        {
            "pages": limits.most_pages,
            "characters": limits.most_characters,
            "memory": limits.most_memory,
            "seconds": limits.most_seconds,
        }
    )
    try:
        process = run_program([sys.executable, "-P", "-c", _PROCESS, told], data, most_seconds=limits.most_seconds)
    except TimeoutError:
        raise NotExtracted("PDF seconds", f"more than {limits.most_seconds:g}") from None
    if process.returncode:
        how = f"signal {-process.returncode}" if process.returncode < 0 else "its memory or a fault of the parser"
        raise NotExtracted("unreadable PDF", f"the process that read it ended: {how}")
    return json.loads(process.stdout)
