"""Reading text as documents: from files, from folders, or from the standard library of the running Python.

Bytes are preserved: line ends are not translated, a byte order mark is kept. A file is one document, unless lines with
only `<|endoftext|>` divide it into several. A corpus that `napkin data` made is a folder with manifest.json, and files
in `documents/`. Documents are split into training and validation by a hash of each one's text.
"""

import gzip
import importlib
import io
import itertools
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, Literal, cast

import msgspec

from napkin.data.file_sections import (
    FIRST_BLOCK_BYTES,
    SEPARATOR_LINE,
    choose_split,
    has_text,
    is_one_section,
    read_sections,
)
from napkin.errors import CorruptFile, NapkinError, first_line
from napkin.files import StrPath, is_marked, regular, regular_and_size
from napkin.tokenizer.text_input import check_utf8, utf8


class Document:
    """A text, or a part of one, and its name for messages; `continues` if it is a further part of the preceding one.

    It is given as text, or as `data`, which must be valid UTF-8; the other form is made on first use, so that a text
    that is read and encoded as bytes never becomes a string.

    >>> Document("greeting", data=b"hello")
    Document(name='greeting', text='hello', continues=False)
    """

    # A folder of small files makes very many: with slots, one is made in a third of the time.
    __slots__ = ("_data", "_digest", "_text", "continues", "name")

    def __init__(
        self, name: str, text: str | None = None, continues: bool = False, *, data: bytes | None = None
    ) -> None:
        if (text is None) == (data is None):
            raise NapkinError(f"document {name!r} is given {'neither' if text is None else 'both'}: give text or data")
        self.name = name
        self.continues = continues
        self._text = text
        self._data = data
        self._digest: bytes | None = None

    @property
    def text(self) -> str:
        """The text as a string."""
        if self._text is None:
            self._text = self.data.decode()
        return self._text

    @property
    def data(self) -> bytes:
        """The text as UTF-8. Raises NapkinError for a lone surrogate."""
        if self._data is None:
            self._data = utf8(self.text, f"'{self.name}'")
        return self._data

    @property
    def digest(self) -> bytes:
        """The BLAKE2b hash of the UTF-8, eight bytes."""
        if self._digest is None:
            self._digest = blake2b(self.data, digest_size=8).digest()
        return self._digest

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Document):
            return NotImplemented
        return (self.name, self.text, self.continues) == (other.name, other.text, other.continues)

    def __hash__(self) -> int:
        return hash((self.name, self.text, self.continues))

    def __repr__(self) -> str:
        return f"Document(name={self.name!r}, text={self.text!r}, continues={self.continues!r})"


_WAY_OUT = "restore it, or make the corpus again in another folder"
_MARK = b'"kind": "napkin corpus"'


class _File(msgspec.Struct):
    name: str
    file_bytes: int


class _Manifest(msgspec.Struct):
    files: list[_File]


class _Line(msgspec.Struct):
    identity: str
    text: str


def is_corpus(folder: Path) -> bool:
    """True if a folder is a finished corpus."""
    return is_marked(folder / "manifest.json", _MARK)


def files_of_corpus(corpus: Path) -> list[Path]:
    """The files with a corpus's documents, in order. Raises CorruptFile where one is missing or has another size."""
    try:
        manifest = msgspec.json.decode((corpus / "manifest.json").read_bytes(), type=_Manifest)
    except msgspec.MsgspecError as error:
        raise CorruptFile(f"'{corpus / 'manifest.json'}' is damaged ({error}): restore it") from None
    paths: list[Path] = []
    for file in manifest.files:
        path = corpus / "documents" / Path(file.name).name
        size = path.stat().st_size if path.is_file() else None
        if size != file.file_bytes:
            what = "is missing" if size is None else f"has {size:,} bytes instead of {file.file_bytes:,}"
            raise CorruptFile(f"'{path}' {what}: {_WAY_OUT}")
        paths.append(path)
    return paths


def read_curated(file: Path, part_bytes: int | None) -> Iterator[Document]:
    """The documents of a file, each by its identity; a larger one than `part_bytes` in parts, as `read_documents`.

    Raises CorruptFile where the file is damaged, NapkinError where a library is missing.
    """
    zstandard_errors = (_library("zstandard").ZstdError,) if file.suffix == ".zst" else ()
    try:
        for identity, text in _parquet_rows(file) if file.suffix == ".parquet" else _lines(file):
            data = text.encode()
            if has_text(data):
                yield from _in_parts(identity, data, part_bytes or max(len(data), 1))
    except (ValueError, EOFError, zlib.error, OSError, *zstandard_errors) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CorruptFile(f"'{file}' is damaged ({first_line(error)}): {_WAY_OUT}") from None


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    decoder = msgspec.json.Decoder(_Line)
    with ExitStack() as stack:
        lines: Any = stack.enter_context(open(file, "rb", opener=regular))
        if file.suffix == ".gz":
            lines = stack.enter_context(gzip.GzipFile(fileobj=cast(IO[bytes], lines)))
        elif file.suffix == ".zst":
            decompressor = _library("zstandard").ZstdDecompressor()
            lines = io.BufferedReader(decompressor.stream_reader(lines, read_across_frames=True))
        for line in lines:
            decoded = decoder.decode(line)
            yield decoded.identity, decoded.text


def _parquet_rows(file: Path) -> Iterator[tuple[str, str]]:
    table = _library("pyarrow.parquet").ParquetFile(file)
    for batch in table.iter_batches(batch_size=64, columns=["identity", "text"], use_threads=False):
        for row in batch.to_pylist():
            yield row["identity"], row["text"]


def _in_parts(identity: str, data: bytes, part_bytes: int) -> Iterator[Document]:
    begin, size = 0, part_bytes
    while len(data) - begin > size:
        split = choose_split(data[begin : begin + size])
        if split is None:
            # White space belongs to the text that follows it.
            size *= 2
            continue
        yield Document(identity, None, begin > 0, data=data[begin : begin + split])
        begin, size = begin + split, part_bytes
    yield Document(identity, None, begin > 0, data=data[begin:])


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        library = name.partition(".")[0]
        raise NapkinError(f"a corpus needs {library}: pip install {library}") from None


_NOT_TEXT_FOLDERS = frozenset({"__pycache__"})
_NOT_LIBRARY_FOLDERS = _NOT_TEXT_FOLDERS | {"test", "tests", "idle_test", "site-packages"}
_BINARY_PROBE_BYTES = 8192


def read_documents(
    paths: Sequence[StrPath],
    *,
    suffixes: Sequence[str] | None = None,
    on_skip: Callable[[Path], None] | None = None,
    part_bytes: int | None = None,
    on_inline: Callable[[Path], None] | None = None,
) -> Iterator[Document]:
    """Read the documents in `paths`, in that order, in memory of the largest document.

    With `part_bytes`, a longer document comes in parts of about that size, split where `find_split` says, or failing
    that `find_any_split`, or between any two characters; all parts but the first have `continues` set. Memory is then
    that of a part.

    A folder is walked in sorted order without hidden entries, `__pycache__` and links to folders; of its files, those
    that end in one of `suffixes` (`".py"`, `".md"`; all if None) are read. Files with a NUL in their first 8 KiB are
    binary: they are skipped and passed to `on_skip`. A file named in `paths` is always read. A file with
    `<|endoftext|>` lines gives documents `NAME#1`, `NAME#2`, ...; joined with those lines they are the file again.
    Where it is not a line of its own it is text, and the file is passed to `on_inline`; see `divide_inline`. Text of
    only white space is not a document. Of a corpus that `napkin data` made, the documents are read.

    Raises NapkinError for a path that does not exist (immediately), and while iterating for a file that cannot be read,
    is not UTF-8, or was named and has no text, and if no document was found at all.
    """
    paths = [Path(path) for path in paths]
    for path in paths:
        with _readable(path):
            if not path.exists():
                raise NapkinError(f"'{path}' does not exist: name a text file or a folder of text files")

    def ignore(path: Path) -> None:
        pass

    return _read_documents(paths, suffixes, part_bytes, on_skip or ignore, on_inline or ignore)


def standard_library() -> Iterator[Document]:
    """Read the Python files of the running Python's standard library, a corpus that is always available.

    About 700 documents, 12 MB, sorted by name, which is relative to the library's folder. Tests, installed packages and
    files that are not UTF-8 are left out. Raises NapkinError if the library has no source files.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = {
        Path(file).relative_to(folder).as_posix(): file
        for file in _walk(str(folder), _NOT_LIBRARY_FOLDERS)
        if file.endswith(".py")
    }
    if not files:
        raise NapkinError(f"'{folder}' contains no .py files: name text files or folders instead")
    for name in sorted(files):
        data = Path(files[name]).read_bytes()
        try:
            data.decode()
        except UnicodeDecodeError:
            continue
        if has_text(data):
            yield Document(name, data=data)


def _read_documents(
    paths: list[Path],
    suffixes: Sequence[str] | None,
    part_bytes: int | None,
    on_skip: Callable[[Path], None],
    on_inline: Callable[[Path], None],
) -> Iterator[Document]:
    found, endings = False, None if suffixes is None else tuple(suffixes)
    for path in paths:
        if not path.is_dir():
            yield from _read_file(str(path), part_bytes, on_inline)
            found = True
            continue
        if is_corpus(path):
            for file in files_of_corpus(path):
                of_file = _read_file(str(file), part_bytes, on_inline) if file.suffix == ".txt" else None
                for document in of_file or read_curated(file, part_bytes):
                    found = True
                    yield document
            continue
        for file in _walk(str(path), _NOT_TEXT_FOLDERS):
            if endings is not None and not file.endswith(endings):
                continue
            for document in _read_file(file, part_bytes, on_inline, on_skip):
                found = True
                yield document
    if not found:
        places = ", ".join(f"'{path}'" for path in paths) or "an empty list of paths"
        ending = f" that ends in {' or '.join(suffixes)}" if suffixes else ""
        raise NapkinError(f"no text{ending} found in {places}: name a text file or a folder of text files")


def divide_inline(documents: Iterable[Document]) -> Iterator[Document]:
    """Divide documents at each `<|endoftext|>` within them, into `NAME:1`, `NAME:2`, ...; not those without one.

    Text of only white space between two is not a document.
    """
    # True if only white space has come since the last boundary, so that the next part begins a document.
    begins = False
    for document in documents:
        pieces = document.data.split(SEPARATOR_LINE)
        for number, data in enumerate(pieces, start=1):
            continues = number == 1 and document.continues and not begins
            begins = not continues and not has_text(data)
            if not begins:
                name = document.name if len(pieces) == 1 else f"{document.name}:{number}"
                yield Document(name, None, continues, data=data)


def _walk(folder: str, skipped_folders: frozenset[str]) -> Iterator[str]:
    # Strings, not paths: of a folder of small files, making paths would take longer than reading them. Not recursive:
    # folders may be nested more deeply than Python calls functions.
    waiting = [_entries(folder, "" if folder == "." else folder if folder.endswith(os.sep) else folder + os.sep)]
    while waiting:
        for path, entry in waiting[-1]:
            try:
                is_file = entry.is_file()
                # A link to a parent folder would make the walk endless.
                is_entered = not is_file and entry.is_dir() and not entry.is_symlink()
            except OSError:
                # A link that leads to itself is neither.
                continue
            if is_file:
                yield path
            elif is_entered and entry.name not in skipped_folders:
                waiting.append(_entries(path, path + os.sep))
                break
        else:
            waiting.pop()


def _entries(folder: str, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    with _readable(folder), os.scandir(folder) as entries:
        ordered = sorted([entry for entry in entries if not entry.name.startswith(".")], key=attrgetter("name"))
    for entry in ordered:
        yield prefix + entry.name, entry


def _read_file(
    path: str,
    part_bytes: int | None,
    on_inline: Callable[[Path], None],
    on_skip: Callable[[Path], None] | None = None,
) -> Iterable[Document]:
    """The documents of a file; one that was found in a folder has `on_skip`, and is passed to it if it is binary."""
    try:
        descriptor, size_bytes = regular_and_size(path)
        try:
            block = os.read(descriptor, FIRST_BLOCK_BYTES)
            if on_skip is not None and block.find(b"\0", 0, _BINARY_PROBE_BYTES) >= 0:
                on_skip(Path(path))
                return ()
            if not is_one_section(block, size_bytes, part_bytes):
                rest, descriptor = descriptor, None
                return _read_sections(path, rest, block, part_bytes, on_inline, on_skip is None)
        finally:
            if descriptor is not None:
                os.close(descriptor)
    except OSError as error:
        raise _unreadable(path, error) from error
    # Most files are small: the generators of sections would take longer than reading them.
    check_utf8(block, path, 0)
    if has_text(block):
        return (Document(path, data=block),)
    if on_skip is None:
        raise _without_text(path)
    return ()


def _read_sections(
    path: str,
    descriptor: int,
    block: bytes,
    part_bytes: int | None,
    on_inline: Callable[[Path], None],
    needs_text: bool,
) -> Iterator[Document]:
    """The documents of an open file, of which `block` has been read already; it is closed after the last one."""
    number = 0
    with _readable(path):
        try:
            for offset, data, of_whole_file, continues in read_sections(
                descriptor, block, part_bytes, lambda: on_inline(Path(path))
            ):
                check_utf8(data, path, offset)
                # If a text comes in parts, the first contains text, and the others belong to it even if they are white
                # space.
                if continues or has_text(data):
                    number += not continues
                    yield Document(path if of_whole_file else f"{path}#{number}", None, continues, data=data)
        finally:
            os.close(descriptor)
    if needs_text and not number:
        raise _without_text(path)


def _without_text(path: str) -> NapkinError:
    return NapkinError(f"'{path}' contains no text: name a file with text in it")


@contextmanager
def _readable(path: StrPath) -> Iterator[None]:
    """Turn an OSError while reading `path` into a NapkinError."""
    try:
        yield
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: StrPath, error: OSError) -> NapkinError:
    return NapkinError(f"'{path}' cannot be read ({error.strerror}): leave it out or make it readable")


Side = Literal["training", "validation"]


def split_documents(documents: Iterable[Document], fraction: float, side: Side) -> Iterator[Document]:
    """The documents of one side; see `split_into_sides`."""
    return (document for each, document in split_into_sides(documents, fraction) if each == side)


def split_into_sides(documents: Iterable[Document], fraction: float) -> Iterator[tuple[Side, Document]]:
    """Each document with its side; `fraction` (0 to 1) of them are held out for validation, see `is_validation`.

    A single document is cut in two instead: about the last `fraction` of it is held out, from the beginning of a nearby
    line or word if there is one. The same is done with each part of a document that comes in parts; the two halves of a
    part are then documents. Halves of only white space are dropped. Memory is that of two documents, or parts.

    Raises NapkinError if the fraction is out of range.
    """
    _check_fraction(fraction)
    bound, first = fraction * 2**64, True
    # The following one tells whether a document comes in parts, or is the only one.
    for document, following in itertools.pairwise(itertools.chain(documents, [None])):
        assert document is not None
        alone = first and following is None
        in_parts = document.continues or (following is not None and following.continues)
        first = False
        if (alone or in_parts) and 0 < fraction < 1:
            for side, half in _cut(document, fraction):
                if has_text(half.data):
                    yield side, half
        else:
            yield "validation" if _is_below(document, bound) else "training", document


def is_validation(document: Document, fraction: float) -> bool:
    """True if `document` belongs to the held-out `fraction` (0 to 1) of all documents, by a hash of its text.

    So the same text is never on both sides, whatever its name and however often it occurs; the order, the machine and
    the other documents do not matter; and a larger fraction holds out everything that a smaller one does.
    """
    _check_fraction(fraction)
    return _is_below(document, fraction * 2**64)


def _is_below(document: Document, bound: float) -> bool:
    return int.from_bytes(document.digest, "little") < bound


def _cut(document: Document, fraction: float) -> Iterator[tuple[Side, Document]]:
    middle = _middle(document.data, fraction)
    yield "training", Document(f"{document.name} (training)", data=document.data[:middle])
    yield "validation", Document(f"{document.name} (validation)", data=document.data[middle:])


def _middle(data: bytes, fraction: float) -> int:
    """Where a text is cut so that about the last `fraction` of its characters are held out."""
    offset_of, n_characters = _character_offsets(data)
    middle = round(n_characters * (1 - fraction))
    # A text may be one very long line after a short one: a boundary too far back would leave one side almost empty.
    nearby = max(0, middle - min(middle, n_characters - middle) // 2)
    begin, end = offset_of(nearby), offset_of(middle)
    for boundary in (b"\n", b" "):
        if (found := data.rfind(boundary, begin, end)) >= 0:
            return found + 1
    return end


def _character_offsets(data: bytes) -> tuple[Callable[[int], int], int]:
    """A function from the number of a character of UTF-8 to its offset in bytes, and how many characters there are."""
    if data.isascii():
        return int, len(data)
    import numpy as np

    # All bytes but 0x80 to 0xBF, which continue a character.
    begins = np.frombuffer(data, np.int8) >= -64
    counts = [int(np.count_nonzero(begins[start : start + _COUNTED])) for start in range(0, len(data), _COUNTED)]

    def offset_of(number: int) -> int:
        for block, count in enumerate(counts):
            if number < count:
                start = block * _COUNTED
                return start + int(np.flatnonzero(begins[start : start + _COUNTED])[number])
            number -= count
        return len(data)

    return offset_of, sum(counts)


# Bytes whose characters are counted together.
_COUNTED = 2**14


def _check_fraction(fraction: float) -> None:
    if not 0 <= fraction <= 1:
        raise NapkinError(f"a validation fraction of {fraction} is not possible: choose from 0 to 1")
