"""Text as documents: from files, from folders, or from the standard library of the running Python.

Bytes are preserved: line ends are not translated, a byte order mark stays. A file is a document, unless lines
that hold nothing but `<|endoftext|>` divide it into several.
"""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from napkin.errors import NapkinError
from napkin.files import StrPath

_SEPARATOR_LINES = (b"<|endoftext|>\n", b"<|endoftext|>\r\n", b"<|endoftext|>")
_NOT_TEXT_FOLDERS = frozenset({"__pycache__"})
_NOT_LIBRARY_FOLDERS = _NOT_TEXT_FOLDERS | {"test", "tests", "idle_test", "site-packages"}
_BINARY_PROBE_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Document:
    """A text that stands for itself, and the name under which messages mention it."""

    name: str
    text: str


def read_documents(
    paths: Sequence[StrPath],
    *,
    suffixes: Sequence[str] | None = None,
    on_skip: Callable[[Path], None] | None = None,
) -> Iterator[Document]:
    """Read the documents in `paths`, in that order; memory stays that of the largest document.

    A folder is walked in sorted order without hidden entries, `__pycache__` and links to folders; of the
    files in it, those that end in one of `suffixes` (`".py"`, `".md"`; all if None) are read. Those with a
    NUL in their first 8 KiB are binary: they are left out and told to `on_skip`. A file named in `paths` is
    always read. A file divided by `<|endoftext|>` lines gives documents `NAME#1`, `NAME#2`, ...; joined with
    those lines they are the file again. Stretches of nothing but white space are no documents.

    Raises NapkinError for a path that does not exist (at once), and while iterating for a file that cannot be
    read, is not UTF-8, or was named and holds no text, and where no document was found at all.
    """
    paths = [Path(path) for path in paths]
    for path in paths:
        with _readable(path):
            if not path.exists():
                raise NapkinError(f"'{path}' does not exist: name a text file or a folder of text files")
    return _read_documents(paths, suffixes, on_skip)


def standard_library() -> Iterator[Document]:
    """Read the Python files of the running Python's standard library, a corpus that is always at hand.

    About 700 documents, 12 MB. Tests, installed packages and files that are not UTF-8 are left out. Names are
    relative to the library's folder, and in their order. Raises NapkinError where the library has no sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = {
        file.relative_to(folder).as_posix(): file
        for file in _walk(folder, _NOT_LIBRARY_FOLDERS)
        if file.suffix == ".py"
    }
    if not files:
        raise NapkinError(f"'{folder}' holds no .py files: name text files or folders of your own")
    for name in sorted(files):
        try:
            text = files[name].read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield Document(name, text)


def _read_documents(
    paths: list[Path], suffixes: Sequence[str] | None, on_skip: Callable[[Path], None] | None
) -> Iterator[Document]:
    found = False
    for path in paths:
        if not path.is_dir():
            yield from _read_file(path, required=True)
            found = True
            continue
        for file in _walk(path, _NOT_TEXT_FOLDERS):
            if suffixes is not None and not file.name.endswith(tuple(suffixes)):
                continue
            if _is_binary(file):
                if on_skip is not None:
                    on_skip(file)
                continue
            for document in _read_file(file, required=False):
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
                # A link to a folder may lead back up, and the walk would never end.
                if entry.name not in skipped_folders and not entry.is_symlink():
                    yield from _walk(entry, skipped_folders)
            elif entry.is_file():
                yield entry


def _is_binary(path: Path) -> bool:
    with _readable(path), open(path, "rb") as file:
        return b"\0" in file.read(_BINARY_PROBE_BYTES)


def _read_file(path: Path, *, required: bool) -> Iterator[Document]:
    number = 0
    for offset, data, is_whole in _pieces(path):
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise NapkinError(
                f"'{path}' is not UTF-8 at byte {offset + error.start}: convert it (iconv -t UTF-8) or leave it out"
            ) from error
        if text.strip():
            number += 1
            yield Document(str(path) if is_whole else f"{path}#{number}", text)
    if required and not number:
        raise NapkinError(f"'{path}' holds no text: name a file with text in it")


def _pieces(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (offset, bytes, whether it is the whole file) of each stretch between separator lines."""
    lines: list[bytes] = []
    start = position = 0
    with _readable(path), open(path, "rb") as file:
        for line in file:
            position += len(line)
            if line in _SEPARATOR_LINES:
                yield start, b"".join(lines), False
                lines, start = [], position
            else:
                lines.append(line)
    yield start, b"".join(lines), start == 0


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to read `path` into one line for people."""
    try:
        yield
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): leave it out or make it readable") from error
