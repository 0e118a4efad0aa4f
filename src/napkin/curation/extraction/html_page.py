"""The text of an HTML page: bytes, characters, tree, tables of elements and blocks, a choice among these, text."""

from dataclasses import dataclass

import numpy as np

from napkin.curation.extra import import_extra
from napkin.curation.extraction.main_content import main_blocks, with_main_heading
from napkin.curation.extraction.not_extracted import NotExtracted
from napkin.curation.extraction.page_encoding import decode_page
from napkin.curation.extraction.page_metadata import PageMetadata, page_metadata
from napkin.curation.extraction.page_tables import page_tables
from napkin.curation.extraction.parsed_size import parsed_size
from napkin.curation.extraction.rendering import render


@dataclass(frozen=True)
class HtmlLimits:
    """What is read at most of one page: bytes, elements that a parser would make of it, attributes of a tag.

    Attributes of several tags count as the root of their squares' sum, as a parser takes seconds for them.
    """

    most_bytes: int = 20_000_000
    most_elements: int = 200_000
    most_attributes: int = 10_000


@dataclass(frozen=True)
class ExtractedPage:
    """The text of a page, what it says of itself, and its encoding."""

    text: str
    encoding: str
    metadata: PageMetadata


def extract_html(
    data: bytes,
    *,
    charset: str = "",
    main_content: bool = True,
    heading: bool = True,
    markdown: bool = True,
    limits: HtmlLimits = HtmlLimits(),
) -> ExtractedPage:
    """The text of a page and what it says of itself.

    Args:
        data: the page as it was sent, decompressed.
        charset: the encoding that the HTTP header declared, if it did.
        main_content: leave out navigation, comments, advertising and the like; else all text is kept.
        heading: begin the main content with the page's main heading, where that stands apart from it.
        markdown: mark headings, lists, tables, quotations and code; else paragraphs only.
        limits: what is read at most.

    Raises:
        NotExtracted: the page is over one of the limits.
        NapkinError: the extra `curation` is not installed.
    """
    if len(data) > limits.most_bytes:
        raise NotExtracted("page bytes", f"{len(data):,} > {limits.most_bytes:,}")
    parser = import_extra("resiliparse.parse.html", "an HTML page")
    text, encoding = decode_page(data, charset)
    utf8 = text.encode("utf-8", "replace")
    elements, attributes = parsed_size(utf8, limits.most_elements, limits.most_attributes)
    if elements > limits.most_elements:
        raise NotExtracted("page elements", f"{elements:,} > {limits.most_elements:,}")
    if attributes > limits.most_attributes:
        raise NotExtracted("attributes of a tag", f"{attributes:,} > {limits.most_attributes:,}")
    page = str(parser.HTMLTree.parse(text))
    tables = page_tables(page.encode("utf-8", "replace"), limits.most_elements)
    if tables is None:
        raise NotExtracted("page elements", f"more than {limits.most_elements:,}")
    metadata = page_metadata(page)
    kept = main_blocks(tables) if main_content else np.ones(len(tables.blocks), bool)
    if main_content and heading:
        kept = with_main_heading(tables, kept, metadata.title)
    return ExtractedPage(render(tables, kept, markdown=markdown, whole=not main_content), encoding, metadata)
