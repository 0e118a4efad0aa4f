"""Reading text as documents: from files, from folders, or from the standard library of the running Python.

Bytes are preserved: line ends are not translated, a byte order mark is kept. A file is one document, unless lines with
only `<|endoftext|>` divide it into several.
"""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.tokenizer.split_points import find_split

_SEPARATOR_LINES = (b"<|endoftext|>\n", b"<|endoftext|>\r\n", b"<|endoftext|>")
_NOT_TEXT_FOLDERS = frozenset({"__pycache__"})
_NOT_LIBRARY_FOLDERS = _NOT_TEXT_FOLDERS | {"test", "tests", "idle_test", "site-packages"}
_BINARY_PROBE_BYTES = 8192
# How far before the end of a part its split point may be.
_SPLIT_WINDOW_BYTES = 2**14


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or a part of one, and its name for messages."""

    name: str
    text: str
    continues: bool = False
    """Whether it is a further part of the preceding document."""


def read_documents(
    paths: Sequence[StrPath],
    *,
    suffixes: Sequence[str] | None = None,
    on_skip: Callable[[Path], None] | None = None,
    part_bytes: int | None = None,
) -> Iterator[Document]:
    """Read the documents in `paths`, in that order, in memory of the largest document.

    With `part_bytes`, a longer document comes in parts of about that size, split where `find_split` says; all parts but
    the first have `continues` set. Memory is then that of a part.

    A folder is walked in sorted order without hidden entries, `__pycache__` and links to folders; of its files, those
    that end in one of `suffixes` (`".py"`, `".md"`; all if None) are read. Files with a NUL in their first 8 KiB are
    binary: they are skipped and passed to `on_skip`. A file named in `paths` is always read. A file with
    `<|endoftext|>` lines gives documents `NAME#1`, `NAME#2`, ...; joined with those lines they are the file again. Text
    of only white space is not a document.

    Raises NapkinError for a path that does not exist (immediately), and while iterating for a file that cannot be read,
    is not UTF-8, or was named and has no text, and if no document was found at all.
    """
    paths = [Path(path) for path in paths]
    for path in paths:
        with _readable(path):
            if not path.exists():
                raise NapkinError(f"'{path}' does not exist: name a text file or a folder of text files")
    return _read_documents(paths, suffixes, on_skip, part_bytes)


def standard_library() -> Iterator[Document]:
    """Read the Python files of the running Python's standard library, a corpus that is always available.

    About 700 documents, 12 MB, sorted by name, which is relative to the library's folder. Tests, installed packages and
    files that are not UTF-8 are left out. Raises NapkinError if the library has no source files.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = {
        file.relative_to(folder).as_posix(): file
        for file in _walk(folder, _NOT_LIBRARY_FOLDERS)
        if file.suffix == ".py"
    }
    if not files:
        raise NapkinError(f"'{folder}' contains no .py files: name text files or folders instead")
    for name in sorted(files):
        try:
            text = files[name].read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield Document(name, text)


def _read_documents(
    paths: list[Path],
    suffixes: Sequence[str] | None,
    on_skip: Callable[[Path], None] | None,
    part_bytes: int | None,
) -> Iterator[Document]:
    found = False
    for path in paths:
        if not path.is_dir():
            yield from _read_file(path, part_bytes, required=True)
            found = True
            continue
        for file in _walk(path, _NOT_TEXT_FOLDERS):
            if suffixes is not None and not file.name.endswith(tuple(suffixes)):
                continue
            if _is_binary(file):
                if on_skip is not None:
                    on_skip(file)
                continue
            for document in _read_file(file, part_bytes, required=False):
                found = True
                yield document
    if not found:
        places = ", ".join(f"'{path}'" for path in paths) or "an empty list of paths"
        ending = f" that ends in {' or '.join(suffixes)}" if suffixes else ""
        raise NapkinError(f"no text{ending} found in {places}: name a text file or a folder of text files")


def _walk(folder: Path, skipped_folders: frozenset[str]) -> Iterator[Path]:
    with _readable(folder):
        for entry in sorted(folder.iterdir()):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                # A link to a parent folder would make the walk endless.
                if entry.name not in skipped_folders and not entry.is_symlink():
                    yield from _walk(entry, skipped_folders)
            elif entry.is_file():
                yield entry


def _is_binary(path: Path) -> bool:
    with _readable(path), open(path, "rb") as file:
        return b"\0" in file.read(_BINARY_PROBE_BYTES)


def _read_file(path: Path, part_bytes: int | None, *, required: bool) -> Iterator[Document]:
    number = 0
    for section in _sections(path, part_bytes):
        try:
            text = section.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise NapkinError(
                f"'{path}' is not UTF-8 at byte {section.offset + error.start}: "
                "convert it (iconv -t UTF-8) or leave it out"
            ) from error
        # A part is never only white space: it is split next to a letter.
        if text.strip():
            number += not section.continues
            yield Document(str(path) if section.of_whole_file else f"{path}#{number}", text, section.continues)
    if required and not number:
        raise NapkinError(f"'{path}' contains no text: name a file with text in it")


@dataclass(frozen=True, slots=True)
class _Section:
    """The text between two separator lines, or a part of it."""

    offset: int
    data: bytes
    of_whole_file: bool
    """As far as known when it is read."""
    continues: bool


def _sections(path: Path, part_bytes: int | None) -> Iterator[_Section]:
    lines: list[bytes] = []
    start = size = 0
    continues = divided = False
    wanted = part_bytes
    with _readable(path), open(path, "rb") as file:
        # A line may be as long as the file.
        while line := file.readline(-1 if part_bytes is None else part_bytes):
            begins_line = not lines or lines[-1].endswith(b"\n")
            if begins_line and line in _SEPARATOR_LINES:
                divided = True
                yield _Section(start, b"".join(lines), False, continues)
                start, lines, size, continues, wanted = start + size + len(line), [], 0, False, part_bytes
                continue
            lines.append(line)
            size += len(line)
            if wanted is None or size < wanted:
                continue
            data = b"".join(lines)
            split = find_split(data, max(size - _SPLIT_WINDOW_BYTES, 1))
            if split is None:
                # Doubling keeps the repeated searches linear.
                wanted *= 2
                continue
            yield _Section(start, data[:split], not divided, continues)
            start, lines, size, continues, wanted = start + split, [data[split:]], size - split, True, part_bytes
    yield _Section(start, b"".join(lines), not divided, continues)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn an OSError while reading `path` into a NapkinError."""
    try:
        yield
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): leave it out or make it readable") from error
