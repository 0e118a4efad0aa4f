"""Foreign files: what is right is read as other libraries read it, what is wrong is named and set aside."""

import errno
import gzip
import io
import json
import os
import subprocess
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from napkin.curation.reading.bounded_stream import ReadLimits, SetAside
from napkin.curation.reading.documents import read_file
from napkin.curation.reading.input_file import InputFile, find_files
from napkin.curation.reading.rows import read_jsonl
from napkin.curation.stage import Record
from napkin.errors import NapkinError
from oracles.nested_folders import nested_folders

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
        b"[" * 900 + b"]" * 900,
        b'{"text": 3}',
        b'{"body": "no text"}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        json.dumps({"text": "last"}).encode(),
    ]
    records, aside = read(tmp_path / f"a.jsonl{ending}", compressed(ending)(b"\n".join(lines)))
    first, half, last = records
    assert (half.text, half.identity[-2:]) == ("\ufffd", "#9")
    assert (first.text, first.address, first.licence, first.fields) == (
        "Grüße",
        "https://example.org/1",
        "CC0",
        {"score": 0.5},
    )
    assert (last.text, last.identity[-3:], last.offset) == ("last", "#10", sum(len(line) + 1 for line in lines[:-1]))
    reasons = ["too large", "not JSON", "nested too deeply", "no text", "no text", "broken encoding"]
    assert [each.reason for each in aside] == reasons
    assert [each.identity.rpartition("#")[2] for each in aside] == ["3", "4", "5", "6", "7", "8"]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=[]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def stored(value: Any) -> Any:
    """What a pipeline keeps of a value of JSON, by Python's own library."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {stored(key): stored(each) for key, each in value.items()}
    if isinstance(value, list):
        return [stored(each) for each in value]
    is_large = isinstance(value, int) and not -(2**63) <= value < 2**64
    return str(value) if is_large else value


@given(text=st.text(st.characters(exclude_categories=[])), value=VALUES, ascii_only=st.booleans())
@settings(max_examples=100)
def test_a_line_of_valid_json_is_read_as_python_reads_it(text: str, value: Any, ascii_only: bool) -> None:
    line = json.dumps({"text": text, "value": value}, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    (found,) = read_jsonl(io.BytesIO(line), "a", ReadLimits(), "text")
    try:
        read = json.loads(line.decode())
    except UnicodeDecodeError:
        assert (type(found), getattr(found, "reason", "")) == (SetAside, "broken encoding")
        return
    assert isinstance(found, Record)
    assert (found.text, found.fields["value"]) == (stored(read["text"]), stored(read["value"]))
    # Between two passes records are MessagePack, and in a corpus JSON.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Record) == found
    assert json.loads(msgspec.json.encode(found.fields)) == found.fields


def test_numbers_that_64_bits_do_not_hold_keep_their_digits(tmp_path: Path) -> None:
    numbers = [str(2**64), str(-(2**63) - 1), "9" * 6000, "1e999", "-1E+999", str(2**64 - 1), str(-(2**63)), "1.5"]
    data = b"\xef\xbb\xbf" + "\n".join(f'{{"text": "a", "n": {number}}}' for number in numbers).encode()
    records, aside = read(tmp_path / "a.jsonl", data, ReadLimits())
    assert [record.fields["n"] for record in records] == [*numbers[:5], 2**64 - 1, -(2**63), 1.5]
    assert not aside


@pytest.mark.parametrize(("levels", "is_read"), [(199, True), (200, False), (950, False), (10**5, False)])
def test_json_is_read_up_to_a_depth_that_every_later_reader_can_take(
    tmp_path: Path, levels: int, is_read: bool
) -> None:
    line = b'{"text": "a", "n": ' + b"[" * levels + b"]" * levels + b"}"
    records, aside = read(tmp_path / "a.jsonl", line, ReadLimits())
    assert (len(records), told(aside)) == ((1, []) if is_read else (0, [("a.jsonl#1", "nested too deeply")]))


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
@pytest.mark.parametrize("garbage", [b"garbage behind it", b"\x1f\x8bnot a member", b"\x28\xb5\x2f\xfd" + b"\x08" * 20])
@pytest.mark.parametrize("name", ["a.txt", "a.html", "a.jsonl"])
def test_garbage_behind_a_whole_member_is_told_and_the_document_stays(
    tmp_path: Path, name: str, garbage: bytes, ending: str
) -> None:
    data = b'{"text": "no line end behind it"}'
    parts = [compressed(ending)(data[:10]), compressed(ending)(data[10:])]
    (record,), aside = read(tmp_path / f"{name}{ending}", b"".join(parts) + garbage)
    assert (record.content or record.text.encode()) in (data, b"no line end behind it")
    assert told(aside) == [(f"{name}{ending}", "damaged")]
    assert f"byte {sum(map(len, parts))}" in aside[0].detail
    if ending == ".gz" and not garbage.startswith(b"\x1f"):
        unzipped = subprocess.run(["gunzip"], input=b"".join(parts) + garbage, capture_output=True, check=False)
        assert unzipped.stdout == data


def test_zstd_is_read_with_skippable_frames_before_between_and_behind(tmp_path: Path) -> None:
    skipped = b"\x5a\x2a\x4d\x18\x04\0\0\0skip"
    frame = zstandard.ZstdCompressor().compress
    records, aside = read(tmp_path / "a.txt.zst", skipped + frame(b"one ") + skipped + frame(b"text") + skipped)
    assert [record.text for record in records] == ["one text"]
    assert not aside


@pytest.mark.thorough
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


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("pattern", ["", "/**", "/**/*.txt", "/*/**/e*"])
def test_folders_nested_more_deeply_than_python_calls_functions_are_walked(tmp_path: Path, pattern: str) -> None:
    with nested_folders(tmp_path / "in", 1500) as folder:
        found = list(find_files([f"{folder}{pattern}"]))
    names = [os.path.basename(each.name) for each in found if isinstance(each, InputFile)]
    assert names == (["end.txt"] if pattern == "/*/**/e*" else ["end.txt", "top.txt"])
    assert len(found) == len(names)


def test_what_cannot_be_walked_is_set_aside_by_name_and_the_rest_is_read(tmp_path: Path) -> None:
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "ping").symlink_to("pong")
    (tmp_path / "pong").symlink_to("ping")
    (tmp_path / "nothing").symlink_to("gone")
    for number in range(1, 1500):
        (tmp_path / f"z{number}").symlink_to(f"z{number - 1}")
    (tmp_path / "z0").write_text("the end of all links")
    (tmp_path / "bad\udcff").mkdir()
    (tmp_path / "bad\udcff" / "x.txt").write_text("x")
    (tmp_path / "bad\udcfe").symlink_to("/")
    found = list(find_files([str(tmp_path)]))
    aside = dict(told([each for each in found if isinstance(each, SetAside)]))
    assert {aside.pop(name) for name in ("self", "ping", "pong", "nothing", "x.txt")} == {"unreadable"}
    assert aside.pop("bad?") == "link"
    names = {os.path.basename(each.name) for each in found if isinstance(each, InputFile)}
    # As many links as Linux follows, 40, are read; those that lead on over more are told.
    assert names == {f"z{number}" for number in range(41)}
    assert aside == {f"z{number}": "unreadable" for number in range(41, 1500)}
    for path in (f"{tmp_path}/self", f"{tmp_path}/sel*"):
        assert told(list(find_files([path]))) == [("self", "unreadable")]  # type: ignore[arg-type]


def test_a_folder_whose_path_is_too_long_is_set_aside_by_name(tmp_path: Path) -> None:
    with nested_folders(tmp_path / "in", 30, "d" * 200) as folder:
        aside, top = list(find_files([str(folder)]))
    assert isinstance(aside, SetAside)
    assert (aside.reason, aside.detail) == ("unreadable", os.strerror(errno.ENAMETOOLONG))
    assert isinstance(top, InputFile)


@given(
    names=st.sets(
        st.sampled_from(["a", "b", "ab", ".h", "a/a", "a/b", "a/.h/b", "b/a/a", "b/a/b", "b/ab/a"]), min_size=1
    ),
    parts=st.lists(st.sampled_from(["*", "**", "a", "b*", "?", "[ab]", "a*"]), min_size=1, max_size=4),
)
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_patterns_find_what_python_finds(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], parts: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("x")
    for name in names:
        path = folder / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)

    def visible(paths: Iterable[Path]) -> set[Path]:
        return {path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)}

    pattern = "/".join(["*", *parts])
    matches = visible(folder.glob(pattern if parts[-1] != "**" else f"{pattern}/*"))
    if not matches:
        with pytest.raises(NapkinError, match="does not exist"):
            list(find_files([f"{folder}/{pattern}"]))
        return
    found = {Path(each.name) for each in find_files([f"{folder}/{pattern}"]) if isinstance(each, InputFile)}
    inside = (path for match in matches for path in ([match] if match.is_file() else match.rglob("*")))
    assert found == visible(path for path in inside if path.is_file())


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
    with pytest.raises(NapkinError, match=r"address.*fsspec"):
        list(find_files(["nosuch://x"]))
    missing = InputFile(f"file://{tmp_path}/in/gone.txt", "text", 1, "")
    with pytest.raises(NapkinError, match=r"gone\.txt.*run.*command"):
        list(read_file(missing, LIMITS))
