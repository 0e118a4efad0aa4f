"""The stage `extract`: what was read of a document becomes its text."""

import re
from dataclasses import dataclass
from typing import ClassVar

from napkin.curation.stage import Dropped, Record
from napkin.errors import NapkinError

_HTML = ("text/html", "application/xhtml+xml")
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([\w.:-]{1,40})", re.IGNORECASE)


@dataclass(frozen=True)
class Extract:
    """Make text of HTML pages and PDFs: the main content, without navigation, comments and advertising.

    A document that is text already goes on as it is; one of another kind is dropped.
    """

    name: ClassVar[str] = "extract"

    main_content: bool = True
    """Leave out what is not the page's own: navigation, comments, advertising, related pages; else keep all text."""
    heading: bool = True
    """Begin the main content of an HTML page with its main heading, also where that stands apart from the text."""
    markdown: bool = True
    """Mark headings, lists, tables, quotations and code as in Markdown; else paragraphs only."""
    most_bytes: int = 20_000_000
    """Bytes of the largest page that is read."""
    most_elements: int = 200_000
    """Elements that a parser may make of a page."""
    most_attributes: int = 10_000
    """Attributes that a tag may have."""
    pdf_bytes: int = 200_000_000
    """Bytes of the largest PDF that is read."""
    pdf_pages: int = 5_000
    """Pages of the longest PDF that is read."""
    pdf_seconds: float = 60.0
    """Seconds that reading a PDF may take."""
    pdf_memory: int = 4_000_000_000
    """Bytes of memory that reading a PDF may take."""

    def __post_init__(self) -> None:
        for name in ("most_bytes", "most_elements", "most_attributes", "pdf_bytes", "pdf_pages", "pdf_memory"):
            if getattr(self, name) < 1:
                raise NapkinError(f"{name} is {getattr(self, name)}: use 1 or more")
        if not self.pdf_seconds > 0:
            raise NapkinError(f"pdf_seconds is {self.pdf_seconds}: use more than 0")

    def apply(self, record: Record) -> Record | Dropped:
        """The record with its text and what its page says of itself."""
        from napkin.extraction.html_page import NotExtracted

        if not record.content:
            return record if record.text.strip() else Dropped("no text", record.media_type)
        try:
            if record.media_type in _HTML:
                self._read_html(record)
            elif record.media_type == "application/pdf":
                self._read_pdf(record)
            elif record.media_type.startswith("text/"):
                from napkin.extraction.page_metadata import decode_page

                record.text, record.fields["encoding"] = decode_page(record.content, _charset(record))
            else:
                return Dropped("media type", record.media_type)
        except NotExtracted as error:
            return Dropped(error.rule, error.detail)
        if not record.text.strip():
            return Dropped("no text", record.media_type)
        record.content = b""
        return record

    def _read_html(self, record: Record) -> None:
        from napkin.extraction.html_page import HtmlLimits, extract_html

        page = extract_html(
            record.content,
            charset=_charset(record),
            main_content=self.main_content,
            heading=self.heading,
            markdown=self.markdown,
            limits=HtmlLimits(self.most_bytes, self.most_elements, self.most_attributes),
        )
        record.text, record.fields["encoding"] = page.text, page.encoding
        record.media_type = "text/markdown" if self.markdown else "text/plain"
        said = page.metadata
        record.licence = record.licence or said.licence
        for name, value in (
            ("title", said.title),
            ("page_language", said.language),
            ("canonical", said.canonical),
            ("published", said.published),
        ):
            if value:
                record.fields[name] = value

    def _read_pdf(self, record: Record) -> None:
        from napkin.extraction.pdf_document import PdfLimits, extract_pdf

        document = extract_pdf(
            record.content,
            limits=PdfLimits(
                self.pdf_bytes, self.pdf_pages, most_seconds=self.pdf_seconds, most_memory=self.pdf_memory
            ),
        )
        record.text, record.media_type = document.text, "text/plain"
        if document.title:
            record.fields["title"] = document.title


def _charset(record: Record) -> str:
    """The encoding that the HTTP header declared."""
    found = _CHARSET.search(str(record.fields.get("content_type", "")))
    return found[1] if found else ""
