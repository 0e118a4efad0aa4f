"""The stage `extract`, and PDFs, which a process of its own reads."""

import re

import pytest

from napkin.curation import Dropped, Extract, Record, apply_stages, make_stage
from napkin.errors import NapkinError
from napkin.extraction import NotExtracted, PdfLimits, extract_pdf
from napkin.extraction.pdf_document import join_pages


def _pdf(pages: list[list[str]], title: str = "") -> bytes:
    """A PDF with these lines, one below the other, in Helvetica."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    objects.append(f"<< /Title ({title}) >>")
    kids = []
    for lines in pages:
        shown = " ".join(f"({line}) Tj 0 -14 Td" for line in lines)
        content = f"BT /F1 12 Tf 72 720 Td {shown} ET"
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
        kids.append(f"{len(objects) + 1} 0 R")
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >>"
            f" /Contents {len(objects)} 0 R >>"
        )
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    out, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, start=1):
        places.append(len(out))
        out += f"{number} 0 obj\n{each}\nendobj\n".encode("latin-1")
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{place:010} 00000 n \n".encode() for place in places)
    return out + f"trailer << /Size {len(objects) + 1} /Root 1 0 R /Info 4 0 R >>\nstartxref\n{start}\n%%EOF\n".encode()


def _lines(who: str) -> list[str]:
    return [
        f"{who} committee met on Tuesday and heard three witnes-",
        "ses, who said what they knew of the well-known case.",
        f"{who} committee waits.",
    ]


def _text(who: str) -> str:
    return " ".join(_lines(who)).replace("witnes- ses", "witnesses")


_LINES, _TEXT = _lines("The"), _text("The")


def test_a_pdf_is_read_without_headers_footers_and_divided_words() -> None:
    names = ["This", "That", "Their", "Our"]
    names = ["This", "That", "Their", "Our"]
    pages = [["Annual report", *_lines(who), f"page {number}"] for number, who in enumerate(names, start=1)]
    document = extract_pdf(_pdf(pages, "Report"))
    assert document.text == "\n\n".join(map(_text, names))
    assert document.title == "Report"
    assert document.pages == 4


def test_words_that_have_a_hyphen_elsewhere_keep_it() -> None:
    assert (
        join_pages(["It is a well-known case of a well-\r\nknown kind"])
        == "It is a well-known case of a well-known kind"
    )
    assert (
        join_pages(["It is a divi-\r\nded word in Baden-\r\nBaden there"])
        == "It is a divided word in Baden- Baden there"
    )
    assert join_pages(["", "\r\n"]) == ""


@pytest.mark.parametrize(
    ("data", "limits", "rule"),
    [
        (b"not a PDF", PdfLimits(), "unreadable PDF"),
        (_pdf([_LINES])[:300], PdfLimits(), "unreadable PDF"),
        (_pdf([_LINES] * 3), PdfLimits(most_pages=2), "PDF pages"),
        (_pdf([_LINES]), PdfLimits(most_characters=10), "PDF characters"),
        (_pdf([_LINES]), PdfLimits(most_bytes=10), "PDF bytes"),
        (_pdf([_LINES]), PdfLimits(most_seconds=0.001), "PDF seconds"),
    ],
)
def test_pdfs_over_a_limit_or_damaged_are_named(data: bytes, limits: PdfLimits, rule: str) -> None:
    with pytest.raises(NotExtracted) as error:
        extract_pdf(data, limits=limits)
    assert error.value.rule == rule


@pytest.mark.thorough
def test_the_stage_makes_text_by_media_type_and_says_what_it_drops() -> None:
    page = b'<html lang="de"><head><title>T</title></head><body><p>Ein Satz, der etwas sagt: gr\xfcn.</p></body></html>'
    records = [
        Record("a#1", content=page, media_type="text/html", fields={"content_type": "text/html; charset=latin1"}),
        Record("a#2", content=_pdf([_LINES], "R"), media_type="application/pdf"),
        Record("a#3", content=b"plain", media_type="text/plain"),
        Record("a#4", text="text already"),
        Record("a#5", content=b"\x89PNG", media_type="image/png"),
        Record("a#6", content=b"<p> </p>", media_type="text/html"),
        Record("a#7", content=b"%PDF", media_type="application/pdf"),
    ]
    dropped: list[tuple[str, str]] = []
    stage = make_stage("extract", {"markdown": False})
    kept = list(apply_stages(records, [stage], lambda record, _, why: dropped.append((record.identity, why.rule))))
    assert [record.text for record in kept] == ["Ein Satz, der etwas sagt: grün.", _TEXT, "plain", "text already"]
    assert kept[0].fields["title"] == "T"
    assert kept[0].fields["page_language"] == "de"
    assert re.search("1252|latin|8859", kept[0].fields["encoding"])
    assert kept[1].fields["title"] == "R"
    assert not any(record.content for record in kept)
    assert dropped == [("a#5", "media type"), ("a#6", "no text"), ("a#7", "unreadable PDF")]


def test_options_are_checked_and_limits_are_named() -> None:
    with pytest.raises(NapkinError, match="most_bytes is 0"):
        make_stage("extract", {"most_bytes": 0})
    page = Record("x", content=b"1234", media_type="text/html")
    assert Extract(most_bytes=3).apply(page) == Dropped("page bytes", "4 > 3")
