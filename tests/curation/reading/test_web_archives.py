"""Web archives: read as fastwarc reads them; records with lying lengths are set aside, those behind them are not."""

import gzip
import io
from pathlib import Path

import pytest

from napkin.curation.reading.bounded_stream import ReadLimits, SetAside
from napkin.curation.reading.documents import read_file
from napkin.curation.reading.input_file import InputFile, find_files
from napkin.curation.stage import Record

LIMITS = ReadLimits(document_bytes=100_000)


def record(kind: str, body: bytes, content_type: str, number: int, length: int | str | None = None) -> bytes:
    headers = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-{number:012d}>\r\n"
        f"WARC-Date: 2024-01-01T00:00:00Z\r\nWARC-Target-URI: https://example.org/{number}\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return headers.encode() + body + b"\r\n\r\n"


def response(html: bytes, number: int, headers: str = "Content-Type: text/html; charset=utf-8", **how: object) -> bytes:
    message = f"HTTP/1.1 {how.pop('status', '200 OK')}\r\n{headers}\r\n\r\n".encode() + html
    return record("response", message, "application/http; msgtype=response", number, **how)  # type: ignore[arg-type]


def read(path: Path, data: bytes, limits: ReadLimits = LIMITS) -> tuple[list[Record], list[SetAside]]:
    path.write_bytes(data)
    (file,) = find_files([str(path)])
    assert isinstance(file, InputFile)
    found = list(read_file(file, limits))
    return [each for each in found if isinstance(each, Record)], [each for each in found if isinstance(each, SetAside)]


def numbers(found: list[Record]) -> list[str]:
    return [each.address.rpartition("/")[2] for each in found]


def pages(n: int) -> list[bytes]:
    return [f"<html><p>page {number} {'text ' * number}</p></html>".encode() for number in range(n)]


@pytest.mark.parametrize("zipped", [False, True])
def test_pages_and_texts_are_those_that_fastwarc_finds(tmp_path: Path, zipped: bool) -> None:
    warc = pytest.importorskip("fastwarc.warc")
    parts = [record("warcinfo", b"software: test\r\n", "application/warc-fields", 0)]
    for number, page in enumerate(pages(30), start=1):
        parts.append(record("request", b"GET / HTTP/1.1\r\n\r\n", "application/http; msgtype=request", number))
        parts.append(response(page, number))
    parts.append(record("conversion", "Grüße\n".encode(), "text/plain", 99))
    data = b"".join(gzip.compress(part) for part in parts) if zipped else b"".join(parts)
    found, aside = read(tmp_path / ("a.warc.gz" if zipped else "a.warc"), data)
    assert not aside
    expected = [
        (each.headers["WARC-Target-URI"], each.reader.read())
        for each in warc.ArchiveIterator(io.BytesIO(data))
        if each.headers["WARC-Type"] in ("response", "conversion")
    ]
    assert [(each.address, each.content or each.text.encode()) for each in found] == expected
    assert {each.media_type for each in found[:-1]} == {"text/html"}
    assert found[0].fields == {"date": "2024-01-01T00:00:00Z", "content_type": "text/html; charset=utf-8"}
    whole = b"".join(parts)
    assert all(whole[each.offset :].startswith(b"WARC/1.0\r\n") for each in found)
    assert [int(each.identity.rpartition("#")[2]) for each in found] == [*range(3, 62, 2), 62]


@pytest.mark.parametrize("lie", [5, 700, 2 * 10**5 + 1, 10**15, "many", "-3", "", "9" * 30])
def test_a_lying_length_costs_that_record(tmp_path: Path, lie: int | str) -> None:
    parts = [response(page, number) for number, page in enumerate(pages(10), start=1)]
    parts[4] = response(pages(5)[4], 5, length=lie)
    found, aside = read(tmp_path / "a.warc", b"".join(parts))
    assert {each.reason for each in aside} <= {"wrong length", "not a record"}
    assert aside[0].reason == "wrong length"
    expected = ["1", "2", "3", "4"]
    # A length beyond what may be held is believed as far as the file goes.
    too_far = isinstance(lie, int) and lie > 2 * LIMITS.document_bytes
    assert numbers(found) == (expected if too_far else [*expected, "6", "7", "8", "9", "10"])


def test_what_lies_between_records_is_passed_over_and_named(tmp_path: Path) -> None:
    one, two = response(b"<p>1</p>", 1), response(b"<p>2</p>", 2)
    found, aside = read(tmp_path / "a.warc", b"garbage\n" * 50_000 + one + b"\r\n\r\nmore\n" + two[:-4])
    assert numbers(found) == ["1", "2"]
    assert [(each.reason, each.detail) for each in aside] == [
        ("not a record", "400,000 bytes between records"),
        ("not a record", "9 bytes between records"),
    ]
    assert [each.reason for each in read(tmp_path / "b.warc", b"no archive\n")[1]] == ["not a record"]


def test_a_cut_archive_gives_the_whole_records(tmp_path: Path) -> None:
    parts = [response(page, number) for number, page in enumerate(pages(10), start=1)]
    found, aside = read(tmp_path / "a.warc", b"".join(parts)[:-30])
    assert numbers(found) == [str(number) for number in range(1, 10)]
    assert [each.reason for each in aside] == ["wrong length"]


def test_bodies_are_joined_and_inflated_and_what_is_not_a_page_is_set_aside(tmp_path: Path) -> None:
    html = b"<p>" + b"text " * 400 + b"</p>"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(html[at : at + 100]), html[at : at + 100]) for at in range(0, 2007, 100))
    chunked = "Content-Type: text/html\r\nTransfer-Encoding: chunked"
    zipped = "Content-Type: text/html\r\nContent-Encoding: gzip"
    data = b"".join(
        [
            response(chunks + b"0\r\n\r\n", 1, chunked),
            response(html, 2, chunked),
            response(gzip.compress(html), 3, zipped),
            response(html, 4, zipped),
            response(gzip.compress(bytes(10**6)), 5, zipped),
            response(gzip.compress(html)[:-20], 6, zipped),
            response(b"\x0b\x02\x80", 7, "Content-Type: text/html\r\nContent-Encoding: br"),
            response(html, 8, status="404 Not Found"),
            record("response", b"no HTTP", "application/http", 9),
            response(b"<p>" * 50_000, 10),
            record("resource", html, "text/html", 11),
        ]
    )
    found, aside = read(tmp_path / "a.warc", data)
    assert [(number, each.content) for number, each in zip(numbers(found), found, strict=True)] == [
        (number, html) for number in ("1", "2", "3", "4", "11")
    ]
    assert [(each.identity.rpartition("#")[2], each.reason) for each in aside] == [
        ("5", "too large"),
        ("6", "truncated"),
        ("7", "content encoding"),
        ("8", "HTTP status"),
        ("9", "not HTTP"),
        ("10", "too large"),
    ]
