"""A large file in parts: the documents of the whole, whatever is in it, and wherever it is divided."""

import gzip
import json
import random
from codecs import BOM_UTF8
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin.curation.engine.document_story import find_story
from napkin.curation.engine.pipeline_file import pipeline_of
from napkin.curation.engine.pipeline_run import curate
from napkin.curation.reading import rows
from napkin.curation.reading.bounded_stream import ReadLimits, SetAside
from napkin.curation.reading.documents import divide_file, read_file
from napkin.curation.reading.input_file import InputFile, find_files
from napkin.curation.stage import Record
from napkin.errors import NapkinError

LIMITS = ReadLimits(document_bytes=60)
LINES = [
    *(
        b'{"text": "a"}',
        b'{"text": "\xc3\xa9 line", "n": 1}',
        b"",
        b"  ",
        b"{",
        b'{"text": "\xff"}',
        b"[]",
        b"\x1f\x8b",
    ),
    *(b'{"text": "' + b"x" * 70 + b'"}', b'{"text": ""}\r', BOM_UTF8 + b'{"text": "b"}'),
]
SECTIONS = [b"one\n", b"", b" \n", b"\xff\n", b"two\r\n\r\n", b"x" * 61 + b"\n", b"\xc3\xa9\n", b"a <|endoftext|>\n"]
SEPARATORS = [b"<|endoftext|>\n", b"<|endoftext|>\r\n"]


def file_of(path: Path, data: bytes) -> InputFile:
    path.write_bytes(data)
    (file,) = find_files([str(path)])
    assert isinstance(file, InputFile)
    return file


def found(*files: InputFile) -> list[Record | SetAside]:
    return [each for file in files for each in read_file(file, LIMITS)]


def check_all_divisions(path: Path, data: bytes) -> None:
    file = file_of(path, data)
    whole = found(file)
    for part_bytes in (1, 2, 7, 40, 100, len(data) + 1):
        parts = divide_file(file, LIMITS, part_bytes)
        assert found(*parts) == whole, part_bytes
        assert sum(part.bytes for part in parts) == len(data)
        assert all(part.bytes >= part_bytes for part in parts[:-1])


@given(st.lists(st.sampled_from(LINES), max_size=12), st.booleans(), st.sampled_from([1, 5, 64, 2**20]))
def test_parts_of_json_lines_have_the_documents_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends: bool, block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_BLOCK_BYTES", block)
        # Not compressed, whatever the first line is.
        data = b" " + b"\n".join(lines) + b"\n" * ends
        check_all_divisions(tmp_path_factory.getbasetemp() / "divided.jsonl", data)


@given(st.lists(st.tuples(st.sampled_from(SECTIONS), st.sampled_from(SEPARATORS)), max_size=10), st.booleans())
def test_parts_of_a_text_file_have_the_documents_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, sections: list[tuple[bytes, bytes]], ends: bool
) -> None:
    data = b"".join(section + separator for section, separator in sections) + b"last" * ends
    check_all_divisions(tmp_path_factory.getbasetemp() / "divided.txt", data)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl", "a.html", "a.txt", "b.txt"])
def test_what_cannot_be_read_from_its_middle_is_one_part(tmp_path: Path, name: str) -> None:
    data = b'{"text": "a line"}\n' * 100
    contents = {"a.jsonl.gz": gzip.compress(data), "a.jsonl": gzip.compress(data), "a.txt": b"\0" + data}
    file = file_of(tmp_path / name, contents.get(name, data))
    assert divide_file(file, LIMITS, 10) == [file]


def write_lines(path: Path, n: int) -> None:
    draw = random.Random(0)
    lines = [json.dumps({"text": " ".join(draw.choices(["one", "two", "é", "日本"], k=draw.randint(1, 60)))})]
    lines += [json.dumps({"text": f"line {number} " + "x " * draw.randint(0, 90)}) for number in range(n)]
    lines[n // 2] = "{"
    path.write_text("\n".join(lines), "utf-8")


def corpus_of(out: str, shard_bytes: int, workers: int) -> list[str]:
    """The documents of a corpus, in order."""
    pipeline = pipeline_of(
        {
            "input": {"paths": ["raw"], "shard_bytes": shard_bytes},
            "stage": [{"name": "length", "least": 40}, {"name": "near-duplicates"}],
            "output": {"format": "jsonl"},
        }
    )
    curate(pipeline, out, workers=workers)
    return [line for path in sorted(Path(out, "documents").iterdir()) for line in path.read_text("utf-8").splitlines()]


def test_workers_read_one_large_file_and_write_what_one_of_them_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("raw").mkdir()
    write_lines(Path("raw/large.jsonl"), 400)
    Path("raw/small.txt").write_text("a text of a file that is small, and has one document\n")

    whole = corpus_of("whole", 10**6, 1)
    assert corpus_of("alone", 3000, 1) == whole
    assert corpus_of("together", 3000, 3) == whole
    names = {each.relative_to("alone") for each in Path("alone").rglob("*") if each.is_file()}
    assert len(names) > 10
    for name in names - {Path("meter.json")}:
        assert ("alone" / name).read_bytes() == ("together" / name).read_bytes()

    manifest = json.loads(Path("alone/manifest.json").read_text())
    assert (manifest["input"]["files"], manifest["input"]["bytes"]) == (
        2,
        sum(path.stat().st_size for path in Path("raw").iterdir()),
    )
    for line in whole[::40]:
        identity = json.loads(line)["identity"]
        assert find_story(Path("alone"), identity).ending.startswith("in documents/")


def test_a_corpus_of_files_that_were_not_divided_is_still_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("raw").mkdir()
    write_lines(Path("raw/large.jsonl"), 50)
    corpus_of("corpus", 1000, 1)
    (file,) = find_files(["raw/large.jsonl"])
    assert isinstance(file, InputFile)
    whole = {"shard": 0, "name": file.name, "format": file.format, "bytes": file.bytes, "modified": file.modified}
    Path("corpus/inputs.jsonl").write_text(json.dumps(whole) + "\n")
    corpus_of("corpus", 1000, 1)

    Path("corpus/inputs.jsonl").write_text(json.dumps(whole | {"bytes": file.bytes - 1}) + "\n")
    with pytest.raises(NapkinError, match=r"large\.jsonl' has changed since"):
        corpus_of("corpus", 1000, 1)
