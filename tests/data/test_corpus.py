import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin.data import Document, read_documents, standard_library
from napkin.data.corpus import divide_inline
from napkin.errors import NapkinError
from oracles.nested_folders import nested_folders


def texts(*paths: Path, suffixes: list[str] | None = None) -> list[str]:
    return [document.text for document in read_documents(paths, suffixes=suffixes)]


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip))
def test_a_file_is_one_document_with_its_exact_bytes(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("corpus") / "file.txt"
    path.write_bytes(text.encode())
    assert list(read_documents([path])) == [Document(str(path), text)]


def test_line_ends_and_byte_order_marks_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n\x0c\xc2\x85 \xe2\x80\xa8")
    assert texts(path) == ["\ufeffa\r\nb\rc\n\x0c\x85 \u2028"]


# No two separators stand next to each other and no piece is blank: these are no documents.
PIECES = st.lists(st.text("ab<|>\r\n é€", min_size=1).map(lambda text: f"x{text}\n"), min_size=1)


@given(PIECES, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_documents_joined_with_separator_lines_are_the_file_again(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], line_end: str, ends_open: bool
) -> None:
    path = tmp_path_factory.mktemp("corpus") / "file.txt"
    separator = "<|endoftext|>" + line_end
    content = separator.join(pieces) + ("<|endoftext|>" if ends_open else separator)
    path.write_bytes(content.encode())
    documents = list(read_documents([path]))
    assert [document.text for document in documents] == pieces
    assert [document.name for document in documents] == [f"{path}#{i + 1}" for i in range(len(pieces))]


def test_the_separator_divides_only_where_it_is_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text('END = "<|endoftext|>"\n <|endoftext|>\n<|endoftext|> \n')
    assert texts(path) == [path.read_text()]


def test_blank_stretches_between_separators_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("<|endoftext|>\n<|endoftext|>\n \n<|endoftext|>\none\n<|endoftext|>\n\n")
    assert [(document.name, document.text) for document in read_documents([path])] == [(f"{path}#1", "one\n")]


def test_a_folder_is_walked_in_sorted_order_without_what_is_hidden(tmp_path: Path) -> None:
    for name in ["b/z.txt", "b/a.txt", "a.txt", "c.md", ".git/x.txt", "b/.x.txt", "b/__pycache__/x.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "b" / "empty.txt").write_text("")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "fifo.txt")
    assert texts(tmp_path) == ["a.txt", "b/a.txt", "b/z.txt", "c.md"]
    assert texts(tmp_path, suffixes=[".md"]) == ["c.md"]
    assert texts(tmp_path / "c.md", tmp_path, suffixes=[".md", "z.txt"]) == ["c.md", "b/z.txt", "c.md"]


def test_folders_nested_more_deeply_than_python_calls_functions_and_links_to_themselves_do_not_end_a_walk(
    tmp_path: Path,
) -> None:
    with nested_folders(tmp_path / "in", 1500) as folder:
        (folder / "self").symlink_to("self")
        assert texts(folder) == ["end\n", "top\n"]


def test_binary_files_in_a_folder_are_skipped_and_told(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "text.txt").write_text("text")
    skipped: list[Path] = []
    assert [d.text for d in read_documents([tmp_path], on_skip=skipped.append)] == ["text"]
    assert skipped == [tmp_path / "image.png"]
    assert texts(tmp_path) == ["text"]


@pytest.mark.parametrize("named", [True, False])
def test_a_file_that_is_not_utf8_is_told_with_the_byte(tmp_path: Path, named: bool) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"one\n<|endoftext|>\ngr\xfcn\n")
    documents = read_documents([path if named else tmp_path])
    assert next(documents).text == "one\n"
    with pytest.raises(NapkinError, match=r"latin.txt'.*UTF-8.*byte 20"):
        next(documents)


def test_a_nul_in_a_named_file_is_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a\0b")
    assert texts(tmp_path / "x") == ["a\0b"]


def test_a_missing_path_is_told_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("text")
    with pytest.raises(NapkinError, match=r"gone'.*exist: name"):
        read_documents([tmp_path / "x", tmp_path / "gone"])


@pytest.mark.parametrize("content", [b"", b" \n\t\n", b"<|endoftext|>\n<|endoftext|>"])
def test_a_named_file_without_text_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(NapkinError, match="x' contains no text"):
        texts(tmp_path / "x")


def test_a_folder_without_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(NapkinError, match="no text found in"):
        texts(tmp_path)
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(NapkinError, match=r"text.*\.py.*\.md found"):
        texts(tmp_path, suffixes=[".py", ".md"])
    with pytest.raises(NapkinError, match="empty list"):
        texts()


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that exists and cannot be read")
def test_a_file_that_cannot_be_read_is_told() -> None:
    with pytest.raises(NapkinError, match="/proc/self/mem'"):
        texts(Path("/proc/self/mem"))


def test_a_large_divided_file_is_read_in_constant_memory(tmp_path: Path) -> None:
    path, n_documents = tmp_path / "large.txt", 40_000
    with open(path, "wb") as file:
        file.writelines(b"once upon a time\n" * 60 + b"<|endoftext|>\n" for _ in range(n_documents))
    script = f"""
import resource
from napkin.data.corpus import read_documents
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
documents = read_documents([{str(path)!r}])
next(documents)
before = peak()
print(1 + sum(1 for _ in documents), peak() - before)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    count, growth = map(int, result.stdout.split())
    kibibyte = 1 if sys.platform == "linux" else 1024
    assert count == n_documents
    assert path.stat().st_size > 40_000_000
    assert growth < 4_000 * kibibyte


def test_the_standard_library_is_a_corpus_of_its_python_files() -> None:
    documents = list(standard_library())
    folder = Path(sysconfig.get_path("stdlib"))
    names = [document.name for document in documents]
    assert names == sorted(set(names))
    assert {"abc.py", "json/decoder.py", "collections/__init__.py"} < set(names)
    assert 400 < len(documents) < 1200
    assert 8_000_000 < sum(len(document.text.encode()) for document in documents) < 20_000_000
    for document in documents:
        assert not {"test", "tests", "idle_test", "site-packages", "__pycache__"} & set(document.name.split("/"))
        assert (folder / document.name).read_bytes() == document.text.encode()


def test_separators_within_a_line_are_told_and_may_be_boundaries(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one<|endoftext|>two\n<|endoftext|>\nthree <|endoftext|> \n")
    (tmp_path / "b.txt").write_text("four\n<|endoftext|>\nfive")
    told: list[Path] = []
    documents = list(read_documents([tmp_path], on_inline=told.append))
    assert told == [tmp_path / "a.txt"]
    assert documents[0].text == "one<|endoftext|>two\n"
    divided = [(document.name.removeprefix(f"{tmp_path}/"), document.text) for document in divide_inline(documents)]
    assert divided == [
        *(("a.txt#1:1", "one"), ("a.txt#1:2", "two\n"), ("a.txt#2:1", "three ")),
        *(("b.txt#1", "four\n"), ("b.txt#2", "five")),
    ]


def test_a_part_after_a_boundary_begins_a_document() -> None:
    parts = [("a", False), ("b<|endoftext|> ", True), ("c", True), (" ", True), ("d", False)]
    documents = [Document("x", text, continues) for text, continues in parts]
    divided = [(document.text, document.continues) for document in divide_inline(documents)]
    assert divided == [("a", False), ("b", True), ("c", False), (" ", True), ("d", False)]
