"""Foreign files: what is right is read as other libraries read it, what is wrong is named and set aside."""

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from napkin.curation.reading.documents import read_file
from napkin.curation.reading.input_file import InputFile, find_files
from napkin.curation.reading.set_aside import ReadLimits, SetAside
from napkin.curation.record import Record
from napkin.errors import NapkinError

zstandard = pytest.importorskip("zstandard")
LIMITS = ReadLimits(document_bytes=2000)


def read(path: Path, data: bytes, limits: ReadLimits = LIMITS) -> tuple[list[Record], list[SetAside]]:
    """Documents of a file with these bytes, and what was set aside."""
    path.write_bytes(data)
    (file,) = find_files([str(path)])
    assert isinstance(file, InputFile)
    found = list(read_file(file, limits))
    return [each for each in found if isinstance(each, Record)], [each for each in found if isinstance(each, SetAside)]


def told(aside: list[SetAside]) -> list[tuple[str, str]]:
    """Which document or file, and why."""
    return [(os.path.basename(each.identity), each.reason) for each in aside]


def compressed(kind: str) -> Callable[[bytes], bytes]:
    return {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[kind]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_the_documents_of_a_text_file_are_what_lies_between_separator_lines(tmp_path: Path, ending: str) -> None:
    parts = ["one\n", "two <|endoftext|> is inline\n", "Grüße\r\n", "x" * 1999 + "\n", "y" * 5000 + "\n", "", "last"]
    records, aside = read(tmp_path / f"a.txt{ending}", compressed(ending)("<|endoftext|>\n".join(parts).encode()))
    assert [record.text for record in records] == [parts[0], parts[1], parts[2], parts[3], parts[6]]
    assert [record.identity[-2:] for record in records] == ["#1", "#2", "#3", "#4", "#6"]
    whole = "<|endoftext|>\n".join(parts).encode()
    for record in records:
        assert whole[record.offset :].startswith(record.text.encode())
    assert told(aside) == [(f"a.txt{ending}#5", "too large")]


def test_a_document_that_is_larger_than_a_block_is_not_held(tmp_path: Path) -> None:
    data = b"a" * 5_000_000 + b"\n<|endoftext|>\nsmall\n<|endoftext|>\n" + b"b" * 3_000_000 + b"\n<|endoftext|>\r\nend"
    records, aside = read(tmp_path / "a.txt", data)
    assert [record.text for record in records] == ["small\n", "end"]
    assert [each.detail[:7] for each in aside] == ["5.00 MB", "3.00 MB"]


def test_what_is_not_utf_8_or_is_binary_is_set_aside(tmp_path: Path) -> None:
    records, aside = read(tmp_path / "a.txt", b"fine\n<|endoftext|>\nbad \xff\n<|endoftext|>\nfine too\n")
    assert [record.text for record in records] == ["fine\n", "fine too\n"]
    assert (told(aside), aside[0].detail) == ([("a.txt#2", "broken encoding")], "not UTF-8 at byte 23")
    assert told(read(tmp_path / "b.txt", b"ELF\0\0\0")[1]) == [("b.txt", "binary")]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_each_line_of_json_is_a_document_or_is_set_aside(tmp_path: Path, ending: str) -> None:
    lines = [
        json.dumps({"text": "Grüße", "url": "https://example.org/1", "license": "CC0", "score": 0.5}).encode(),
        b"",
        json.dumps({"text": "x" * 3000}).encode(),
        b'{"text": "cut',
        b"[" * 1500,
        b'{"text": 3}',
        b'{"body": "no text"}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        json.dumps({"text": "last"}).encode(),
    ]
    records, aside = read(tmp_path / f"a.jsonl{ending}", compressed(ending)(b"\n".join(lines)))
    first, last = records
    assert (first.text, first.address, first.licence, first.fields) == (
        "Grüße",
        "https://example.org/1",
        "CC0",
        {"score": 0.5},
    )
    assert (last.text, last.identity[-3:], last.offset) == ("last", "#10", sum(len(line) + 1 for line in lines[:-1]))
    reasons = ["too large", "not JSON", "not JSON", "no text", "no text", "broken encoding", "not JSON"]
    assert [each.reason for each in aside] == reasons
    assert [each.identity.rpartition("#")[2] for each in aside] == ["3", "4", "5", "6", "7", "8", "9"]


def test_a_line_of_100_megabytes_is_counted_and_not_held(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.writelines(b"x" * 1_000_000 for _ in range(100))
        file.write(b'\n{"text": "after it"}\n')
    (found,) = find_files([str(path)])
    assert isinstance(found, InputFile)
    aside, record = list(read_file(found, LIMITS))
    assert isinstance(aside, SetAside)
    assert aside.detail.startswith("100 MB > ")
    assert isinstance(record, Record)
    assert record.text == "after it"


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize(("damage", "reason"), [("cut", "truncated"), ("changed", None), ("more", "damaged")])
def test_a_damaged_file_gives_what_comes_before_the_damage(
    tmp_path: Path, ending: str, damage: str, reason: str | None
) -> None:
    lines = [json.dumps({"text": os.urandom(300).hex()}).encode() for _ in range(400)]
    good = b"".join(compressed(ending)(b"".join(line + b"\n" for line in lines[at : at + 100])) for at in (0, 100))
    rest = compressed(ending)(b"".join(line + b"\n" for line in lines[200:]))
    if damage == "cut":
        rest = rest[: len(rest) // 2]
    elif damage == "changed":
        rest = rest[:8] + bytes(len(rest) - 8)
    else:
        rest = b"no member begins so" + rest
    records, aside = read(tmp_path / f"a.jsonl{ending}", good + rest)
    assert [record.text for record in records[:200]] == [json.loads(line)["text"] for line in lines[:200]]
    assert len(records) < 400
    # A line that the damage has cut is no document.
    assert {record.text for record in records} <= {json.loads(line)["text"] for line in lines}
    name, told_reason = told(aside)[-1]
    # Zeros are blocks of zstd without a last one.
    assert (name, told_reason) == (f"a.jsonl{ending}", reason or ("truncated" if ending == ".zst" else "damaged"))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_zip_bomb_is_set_aside_where_it_begins_to_be_one(tmp_path: Path, ending: str) -> None:
    block = bytes(b"a" * 2**20)
    if ending == ".gz":
        compressor = zlib.compressobj(wbits=31, level=9)
        data = b"".join(compressor.compress(block) for _ in range(200)) + compressor.flush()
    else:
        data = zstandard.ZstdCompressor(level=1).compress(block * 200)
    records, aside = read(tmp_path / f"bomb.txt{ending}", data)
    assert not records
    assert told(aside) == [(f"bomb.txt{ending}", "zip bomb")]


def test_parquet_is_read_by_rows_and_damage_is_named(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"document {number}" for number in range(300)]
    texts[7] = "x" * 3000
    table = arrow.table({"text": texts, "url": [f"https://example.org/{n}" for n in range(300)], "n": list(range(300))})
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, row_group_size=100)
    records, aside = read(tmp_path / "a.parquet", buffer.getvalue())
    assert [record.text for record in records] == [text for text in texts if len(text) < 3000]
    assert (records[-1].address, records[-1].fields) == ("https://example.org/299", {"n": 299})
    assert told(aside) == [("a.parquet#8", "too large")]
    damaged = bytearray(buffer.getvalue())
    damaged[60:200] = bytes(140)
    assert told(read(tmp_path / "b.parquet", bytes(damaged))[1])[-1][1] == "damaged"
    assert told(read(tmp_path / "c.parquet", buffer.getvalue()[:-100])[1]) == [("c.parquet", "damaged")]
    other = io.BytesIO()
    parquet.write_table(arrow.table({"body": ["a"]}), other)
    assert told(read(tmp_path / "d.parquet", other.getvalue())[1]) == [("d.parquet", "no text")]


def test_files_are_found_in_order_and_what_leads_out_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    folder, outside = tmp_path / "in", tmp_path / "outside.txt"
    (folder / "b" / "__pycache__").mkdir(parents=True)
    outside.write_text("secret")
    for name in ("b/2.html", "b/__pycache__/x.txt", "a.txt", ".hidden", "c.warc.gz"):
        (folder / name).write_text("x")
    (folder / "z.txt").symlink_to(outside)
    (folder / "y.txt").symlink_to("a.txt")
    (folder / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "fifo")
    found = list(find_files([str(folder)]))
    names = [(os.path.relpath(each.name, folder), each.format) for each in found if isinstance(each, InputFile)]
    assert names == [("a.txt", "text"), ("b/2.html", "html"), ("c.warc.gz", "warc"), ("y.txt", "text")]
    aside = [each for each in found if isinstance(each, SetAside)]
    assert told(aside) == [("fifo", "unreadable"), ("up", "link"), ("z.txt", "link")]
    assert [each.name for each in find_files([f"{folder}/*.txt"]) if isinstance(each, InputFile)] == [
        f"{folder}/a.txt",
        f"{folder}/y.txt",
        f"{folder}/z.txt",
    ]
    # The pattern finds the folder b and the page in it.
    pages = [each.name for each in find_files([f"{folder}/**"]) if isinstance(each, InputFile)]
    assert pages.count(f"{folder}/b/2.html") == 1
    with pytest.raises(NapkinError, match="is found twice"):
        list(find_files([f"{folder}/a.txt", str(folder)]))
    with pytest.raises(NapkinError, match="does not exist"):
        list(find_files([f"{folder}/nothing*"]))


def test_an_address_is_read_as_the_path_is(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    for name in ("a.txt", "sub/b.jsonl"):
        path = tmp_path / "in" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text('{"text": "x"}\n')
    found = [each for each in find_files([f"file://{tmp_path}/in"]) if isinstance(each, InputFile)]
    assert [each.name for each in found] == [f"file://{tmp_path}/in/a.txt", f"file://{tmp_path}/in/sub/b.jsonl"]
    texts = [record.text for each in found for record in read_file(each, LIMITS) if isinstance(record, Record)]
    assert texts == ['{"text": "x"}\n', "x"]
    with pytest.raises(NapkinError, match="not an address that fsspec knows"):
        list(find_files(["nosuch://x"]))
    missing = InputFile(f"file://{tmp_path}/in/gone.txt", "text", 1, "")
    with pytest.raises(NapkinError, match=r"gone\.txt.*run the same command again"):
        list(read_file(missing, LIMITS))
