"""A token file whose writing was killed, gone on with: the same bytes, and nothing done twice that need not be."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from napkin.data.corpus import Document
from napkin.data.token_file import SEPARATOR, TokenFile
from napkin.data.token_writer import (
    Documents,
    Progress,
    Routed,
    write_token_file,
    write_token_files,
    write_token_files_together,
)
from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import ByteTokenizer
from napkin.tokenizer.bpe_training import train_bpe

TOKENIZER = train_bpe(["the cat in the hat"], 260, [SEPARATOR])
DOCUMENTS = [Document(f"d{i}", f"the cat {i} in the hat 你好 " * (i % 7 + 1)) for i in range(200)]


class Stopped(Exception):
    pass


def until(count: int) -> Iterator[Document]:
    yield from DOCUMENTS[:count]
    raise Stopped


def write_resumably(path: Path, documents: Documents, tokenizer: Tokenizer, **settings: int) -> TokenFile:
    [tokens] = write_token_files({path: documents}, tokenizer, lambda *totals: None, **settings)
    return tokens


@pytest.fixture
def expected(tmp_path: Path) -> bytes:
    write_token_file(tmp_path / "expected", DOCUMENTS, TOKENIZER)
    return (tmp_path / "expected").read_bytes()


@pytest.mark.parametrize("stops", [[], [0], [1], [57], [199], [30, 31, 150]])
def test_a_file_gone_on_with_is_the_one_written_in_one_go(tmp_path: Path, expected: bytes, stops: list[int]):
    path = tmp_path / "tokens"
    for stop in stops:
        with pytest.raises(Stopped):
            write_resumably(path, lambda stop=stop: until(stop), TOKENIZER, bytes_per_record=500)
        assert not path.exists()
    seen: list[int] = []

    [tokens] = write_token_files(
        {path: lambda: DOCUMENTS}, TOKENIZER, lambda _, size, count: seen.append(size), bytes_per_record=500
    )

    tokens.verify()
    assert path.read_bytes() == expected
    assert (tmp_path / "tokens.json").read_bytes() == (tmp_path / "expected.json").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["expected", "expected.json", "tokens", "tokens.json"]
    # At most what lies between two points, of the documents that were done, is done again.
    assert len(seen) <= 200 - max(stops, default=0) + 20


@pytest.mark.parametrize("change", ["text", "tokenizer", "shortened", "no point"])
def test_what_does_not_fit_is_begun_anew(tmp_path: Path, change: str):
    path = tmp_path / "tokens"
    with pytest.raises(Stopped):
        write_resumably(path, lambda: until(100), TOKENIZER, bytes_per_record=500)
    documents, tokenizer = list(DOCUMENTS), TOKENIZER
    if change == "text":
        documents[3] = Document("d3", "another text")
    elif change == "tokenizer":
        tokenizer = ByteTokenizer([SEPARATOR])
    elif change == "shortened":
        os.truncate(tmp_path / ".tokens.partial", 10)
    else:
        (tmp_path / ".tokens.partial.json").write_text("{}")

    write_resumably(path, lambda: documents, tokenizer).verify()

    write_token_file(tmp_path / "expected", documents, tokenizer)
    assert path.read_bytes() == (tmp_path / "expected").read_bytes()


def test_of_two_files_a_stop_in_the_second_leaves_neither_and_goes_on_there(tmp_path: Path, expected: bytes):
    paths = {tmp_path / "one": lambda: DOCUMENTS, tmp_path / "two": lambda: until(90)}
    with pytest.raises(Stopped):
        write_token_files(paths, TOKENIZER, lambda *totals: None, bytes_per_record=500)
    assert not any(path.exists() for path in paths)
    told: list[Path] = []

    paths[tmp_path / "two"] = lambda: DOCUMENTS
    write_token_files(paths, TOKENIZER, lambda path, *totals: told.append(path), bytes_per_record=500)

    assert set(told) == {tmp_path / "two"}
    assert all(path.read_bytes() == expected for path in paths)
    assert sorted(file.name for file in tmp_path.iterdir() if file.name[0] == ".") == []


def test_a_file_that_another_process_writes_is_refused(tmp_path: Path):
    fcntl = pytest.importorskip("fcntl")
    with open(tmp_path / ".tokens.partial", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(NapkinError, match=r"written.*process"):
            write_resumably(tmp_path / "tokens", lambda: DOCUMENTS, TOKENIZER)
        assert not (tmp_path / "tokens").exists()


def test_a_name_that_is_taken_is_refused_before_anything_is_written(tmp_path: Path):
    (tmp_path / "tokens").write_text("mine")

    with pytest.raises(NapkinError, match=r"exists.*overwritten"):
        write_resumably(tmp_path / "tokens", lambda: DOCUMENTS, TOKENIZER)
    assert [file.name for file in tmp_path.iterdir()] == ["tokens"]


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path):
    with pytest.raises(NapkinError, match="cannot be written"):
        write_resumably(tmp_path / "none" / "tokens", lambda: DOCUMENTS, TOKENIZER)


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
def test_a_process_killed_while_it_writes_is_gone_on_with(tmp_path: Path, expected: bytes):
    script = """
import sys, time
sys.path.insert(0, sys.argv[2])
from data.test_token_writer import *
def slow():
    for number, document in enumerate(DOCUMENTS):
        if number > 120:
            time.sleep(0.05)
        yield document
write_resumably(Path(sys.argv[1]), slow, TOKENIZER, bytes_per_record=500)
"""
    path = tmp_path / "tokens"
    process = subprocess.Popen([sys.executable, "-c", script, str(path), str(Path(__file__).parent.parent)])
    point = tmp_path / ".tokens.partial.json"
    while process.poll() is None and not point.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not path.exists()

    write_resumably(path, lambda: DOCUMENTS, TOKENIZER).verify()

    assert path.read_bytes() == expected


def routed(folder: Path, count: int | None = None, documents: list[Document] = DOCUMENTS) -> Routed:
    """Every third document is for the file `b`, the others for `a`; with `count`, it stops after as many."""

    def read() -> Iterator[tuple[Path, Document]]:
        for number, document in enumerate(documents):
            if number == count:
                raise Stopped
            yield folder / ("b" if number % 3 == 2 else "a"), document

    return read


def write_together(folder: Path, documents: Routed, progress: Progress = lambda *totals: None) -> list[TokenFile]:
    return write_token_files_together(
        [folder / "a", folder / "b"], documents, TOKENIZER, progress, bytes_per_record=500
    )


def written_apart(folder: Path, documents: list[Document] = DOCUMENTS) -> list[bytes]:
    (folder / "apart").mkdir()
    sides = [each for n, each in enumerate(documents) if n % 3 != 2], documents[2::3]
    for name, side in zip("ab", sides, strict=True):
        write_token_file(folder / "apart" / name, side, TOKENIZER)
    return [(folder / "apart" / name).read_bytes() for name in ("a", "b", "a.json", "b.json")]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("stops", [[], [0], [1], [57], [199], [30, 31, 150]])
def test_files_written_in_one_pass_are_those_written_one_by_one_whatever_stops(tmp_path: Path, stops: list[int]):
    seen: list[int] = []
    for stop in stops:
        with pytest.raises(Stopped):
            write_together(tmp_path, routed(tmp_path, stop))
    write_together(tmp_path, routed(tmp_path), lambda path, size, count: seen.append(count))
    assert [(tmp_path / name).read_bytes() for name in ("a", "b", "a.json", "b.json")] == written_apart(tmp_path)
    assert not [file for file in tmp_path.iterdir() if file.name[0] == "."]
    # What was recorded is not encoded again.
    assert len(seen) <= 200 - max(stops, default=0) + 30


@pytest.mark.parametrize("changed", [3, 2], ids=["in the first", "in the second"])
def test_a_change_in_one_of_two_files_starts_that_one_over(tmp_path: Path, changed: int):
    with pytest.raises(Stopped):
        write_together(tmp_path, routed(tmp_path, 150))
    documents = list(DOCUMENTS)
    documents[changed] = Document("other", "another text")
    write_together(tmp_path, routed(tmp_path, documents=documents))
    assert [(tmp_path / name).read_bytes() for name in ("a", "b", "a.json", "b.json")] == written_apart(
        tmp_path, documents
    )


def test_fewer_documents_than_are_recorded_start_over(tmp_path: Path):
    with pytest.raises(Stopped):
        write_together(tmp_path, routed(tmp_path, 150))
    write_together(tmp_path, routed(tmp_path, documents=DOCUMENTS[:9]))
    assert [(tmp_path / name).read_bytes() for name in ("a", "b", "a.json", "b.json")] == written_apart(
        tmp_path, DOCUMENTS[:9]
    )


def test_the_same_documents_written_again_leave_the_file_as_it_is(tmp_path: Path):
    path = tmp_path / "tokens"
    first = write_token_file(path, DOCUMENTS, TOKENIZER)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.iterdir()}
    again = write_token_file(path, iter(DOCUMENTS), TOKENIZER)
    assert (again.sha256, again.n_documents) == (first.sha256, first.n_documents)
    others = [DOCUMENTS[1:], DOCUMENTS[::-1], [*DOCUMENTS, Document("one more", "")]]
    for documents, tokenizer in [*((other, TOKENIZER) for other in others), (DOCUMENTS, ByteTokenizer([SEPARATOR]))]:
        with pytest.raises(NapkinError, match=r"exists.*overwritten"):
            write_token_file(path, documents, tokenizer)
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("damaged", ["tokens", "tokens.json"])
def test_a_damaged_file_of_the_same_documents_is_told(tmp_path: Path, damaged: str):
    write_token_file(tmp_path / "tokens", DOCUMENTS, TOKENIZER)
    content = bytearray((tmp_path / damaged).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / damaged).write_bytes(content)
    with pytest.raises(NapkinError):
        write_token_file(tmp_path / "tokens", DOCUMENTS, TOKENIZER)
    assert (tmp_path / damaged).read_bytes() == content
