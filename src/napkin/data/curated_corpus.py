"""The documents of a corpus that `napkin data` made: a folder with manifest.json, and files in `documents/`.

A document of a corpus: its name, and its text as a string or as UTF-8, whichever is asked for.
"""

import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from napkin.data.file_sections import choose_split, has_text
from napkin.errors import CorruptFile, NapkinError, first_line
from napkin.files import is_marked, regular
from napkin.tokenizer.text_input import utf8


class Document:
    """A text, or a part of one, and its name for messages; `continues` if it is a further part of the preceding one.

    It is given as text, or as `data`, which must be valid UTF-8; the other is made when it is asked for, so that a text
    that is read and encoded as bytes never becomes a string.

    >>> Document("greeting", data=b"hello")
    Document(name='greeting', text='hello', continues=False)
    """

    def __init__(
        self, name: str, text: str | None = None, continues: bool = False, *, data: bytes | None = None
    ) -> None:
        if (text is None) == (data is None):
            raise NapkinError(f"document {name!r} is given {'neither' if text is None else 'both'}: give text or data")
        self.name = name
        self.continues = continues
        # Entries of the instance's dictionary take the place of the cached properties below.
        if text is not None:
            self.__dict__["text"] = text
        else:
            self.__dict__["data"] = data

    @cached_property
    def text(self) -> str:
        """The text as a string."""
        return self.data.decode()

    @cached_property
    def data(self) -> bytes:
        """The text as UTF-8. Raises NapkinError for a lone surrogate."""
        return utf8(self.text, f"'{self.name}'")

    @cached_property
    def digest(self) -> bytes:
        """The BLAKE2b hash of the UTF-8, eight bytes."""
        return blake2b(self.data, digest_size=8).digest()

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
    try:
        for identity, text in _parquet_rows(file) if file.suffix == ".parquet" else _lines(file):
            data = text.encode()
            if has_text(data):
                yield from _in_parts(identity, data, part_bytes or max(len(data), 1))
    except (ValueError, EOFError, zlib.error, OSError, *_errors_of(file)) as error:
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


def _errors_of(file: Path) -> tuple[type[Exception], ...]:
    return (_library("zstandard").ZstdError,) if file.suffix == ".zst" else ()


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        library = name.partition(".")[0]
        raise NapkinError(f"a corpus needs {library}: pip install {library}") from None
