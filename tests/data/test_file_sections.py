"""Reading files in blocks, against the plain twin that reads them line by line."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from napkin.data import file_sections
from napkin.data.corpus import Document, read_documents
from napkin.data.file_sections import read_sections
from napkin.errors import NapkinError
from napkin.tokenizer.pre_tokenization import PATTERNS, PreTokenizer
from napkin.tokenizer.text_input import SPLITTABLE_PATTERNS, find_any_split, find_split
from oracles import line_reader

PIECES = [
    *("<|endoftext|>", "<|endoftext|>\n", "<|endoftext|>\r\n", "<|endoftext|>\r", "<|endoftext", "\n", "\r\n", "\r"),
    *(" ", "\t", "a", "word ", "a line\n", "1,2\n", "'s", "x" * 40, "\n" * 30, " " * 30, "\ufeff", "\0"),
    *("世界", "你好。", "。", "мир ", "é", "🦊", "\u3000", "\u2028", "\u0085", "ด้วย", "e\u0301", "/"),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=60).map("".join).map(str.encode)
BYTES = st.one_of(
    TEXTS, st.lists(st.sampled_from([b"\xff", b"\xe4", b"\x80\x80", b"a", *map(str.encode, PIECES)])).map(b"".join)
)


def twin(path: Path, part_bytes: int | None) -> list[object]:
    return list(line_reader.sections(path, part_bytes))


@settings(max_examples=100)
@given(BYTES, st.one_of(st.none(), st.integers(16, 200)), st.integers(1, 64))
@example(b"a\n<|endoftext|>", None, 14)
@example(b"a\n<|endoftext|>\r", None, 15)
@example(b"<|endoftext|>\n<|endoftext|>\n", 16, 1)
@example(b"\xef\xbb\xbf<|endoftext|>\nb", 16, 7)
def test_sections_are_those_of_lines_whatever_the_blocks(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, part_bytes: int | None, block_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("sections") / "text"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_sections, "BLOCK_BYTES", block_bytes)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            first = os.read(descriptor, block_bytes)
            found = [tuple(section) for section in read_sections(descriptor, first, part_bytes)]
        finally:
            os.close(descriptor)
    assert found == twin(path, part_bytes)


@settings(max_examples=80)
@given(BYTES, st.one_of(st.none(), st.integers(16, 200)))
def test_documents_and_errors_are_those_of_lines(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, part_bytes: int | None
) -> None:
    path = tmp_path_factory.mktemp("sections") / "text"
    path.write_bytes(content)
    expected, error = read_until_error(line_reader.read_line_by_line(path, part_bytes))
    found, message = read_until_error(read_documents([path], part_bytes=part_bytes))
    assert found == expected
    assert message.startswith(error or ("" if expected else f"'{path}' contains no text"))
    assert bool(message) == bool(error or not expected)


def read_until_error(documents: Iterator[Document]) -> tuple[list[Document], str]:
    read: list[Document] = []
    try:
        read.extend(documents)
    except NapkinError as error:
        return read, str(error)
    return read, ""


@settings(max_examples=100)
@given(TEXTS.map(bytes.decode), st.sampled_from(sorted(SPLITTABLE_PATTERNS)))
def test_pre_tokens_end_wherever_a_text_may_be_split(text: str, pattern: str) -> None:
    data, splitter = text.encode(), PreTokenizer(pattern)
    whole = list(splitter.split(text))
    for find in (find_split, find_any_split):
        place = 0
        while (place := find(data, place + 1) or 0) > 0:
            parts = data[:place].decode(), data[place:].decode()
            assert [*splitter.split(parts[0]), *splitter.split(parts[1])] == whole, place


def test_the_patterns_that_may_be_split_are_named_ones() -> None:
    assert PATTERNS.keys() > SPLITTABLE_PATTERNS


@pytest.mark.parametrize("letter", ["a", "世", "🦊", "é"])
def test_a_text_without_a_place_to_split_comes_in_parts_of_whole_characters(tmp_path: Path, letter: str) -> None:
    (tmp_path / "text").write_text(letter * 5000)
    parts = list(read_documents([tmp_path / "text"], part_bytes=1000))
    assert max(len(part.data) for part in parts) <= 1000 + len(letter.encode())
    assert "".join(part.text for part in parts) == letter * 5000


def test_white_space_is_not_cut(tmp_path: Path) -> None:
    text = " " * 5000 + "a" * 3000 + "\n" * 5000
    (tmp_path / "text").write_text(text)
    parts = list(read_documents([tmp_path / "text"], part_bytes=1000))
    assert "".join(part.text for part in parts) == text
    assert parts[0].text.strip()
