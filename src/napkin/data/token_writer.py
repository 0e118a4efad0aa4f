"""Writing token files, whole or resumable after a crash.

While `write_token_files` encodes documents, `.NAME.partial` holds the tokens so far, and `.NAME.partial.json` records
how many documents they cover, a checksum of the text of those, and the tokenizer. Tokens are synced to disk before they
are recorded, so after a kill at any moment the record is valid. The next call reads the recorded documents again and
continues after them if their text is the same; if not, or with another tokenizer, it starts over.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from napkin.data.corpus import Document
from napkin.data.token_file import NUMPY_DTYPES, SEPARATOR, Sidecar, TokenFile, dtype_name, sidecar_path
from napkin.errors import NapkinError
from napkin.files import StrPath, already_exists, atomic_file, atomic_write_bytes, publish, sync_folder, try_lock
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.text_input import utf8

Documents = Callable[[], Iterable[Document]]
"""Iterates over the same documents each time it is called."""

# Text between two records: a fraction of a second of encoding.
_BYTES_PER_RECORD = 2**24
_READ_BYTES = 2**22
# Text that is encoded at once.
_CHARACTERS_PER_BATCH = 2**22


def write_token_file(
    path: StrPath,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    progress: Callable[[int, int], None] | None = None,
    *,
    threads: int = 1,
) -> TokenFile:
    """Tokenize `documents` into a new token file at `path` and open it, in memory of the largest document, or a few MB.

    After every few documents `progress(text_bytes, n_tokens)` is called with the totals so far. Raises NapkinError if
    one of the two files exists, if there are no documents, or if the tokenizer has no `<|endoftext|>`.
    """
    path = Path(path)
    # The inner file gets its name first, so a sidecar never exists beside incomplete tokens.
    with atomic_file(sidecar_path(path)) as sidecar_file, atomic_file(path) as file:
        writer = TokenWriter(file, tokenizer, threads)
        for batch in _batches(documents):
            writer.add(batch)
            if progress is not None:
                progress(writer.text_bytes, writer.n_tokens)
        sidecar_file.write(writer.finish(path).to_json())
        sidecar_file.flush()
    return TokenFile.open(path)


def write_token_files(
    documents: Mapping[Path, Documents],
    tokenizer: Tokenizer,
    progress: Callable[[Path, int, int], None],
    *,
    threads: int = 1,
    bytes_per_record: int = _BYTES_PER_RECORD,
) -> list[TokenFile]:
    """Write several token files like `write_token_file`, resumable after a crash.

    All files get their names after the last one is written. `progress(path, text_bytes, n_tokens)` continues from the
    totals of an interrupted call. Raises the same errors as `write_token_file`; after an error, as after a crash, the
    tokens so far are kept for the next call. Only one process at a time can write a file.
    """
    for path in documents:
        for target in (path, sidecar_path(path)):
            if os.path.lexists(target):
                raise already_exists(target)
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_unusable, documents)
        files = {path: stack.enter_context(_open(_partial(path))) for path in documents}
        sidecars: dict[Path, bytes] = {}
        for path, file in files.items():
            writer = _encode(path, file, documents[path], tokenizer, progress, threads, bytes_per_record)
            sidecars[path] = writer.finish(path).to_json()
            file.flush()
            os.fsync(file.fileno())
        for path, sidecar in sidecars.items():
            _publish(path, sidecar)
    return [TokenFile.open(path) for path in documents]


class TokenWriter:
    """Writes documents as tokens to an open file, and computes their counts and checksum.

    Raises NapkinError if the tokenizer has no `<|endoftext|>`.
    """

    def __init__(self, file: BinaryIO, tokenizer: Tokenizer, threads: int = 1) -> None:
        separator = tokenizer.special_tokens.get(SEPARATOR)
        if separator is None:
            raise NapkinError(f"the tokenizer has no {SEPARATOR} to separate documents: use one that has it")
        self.file = file
        self.tokenizer = tokenizer
        self.separator = separator
        self.dtype: Literal["uint16", "uint32"] = dtype_name(tokenizer.vocab_size)
        self.threads = threads
        self.checksum = sha256()
        self.n_documents = self.n_tokens = self.text_bytes = 0

    @property
    def token_bytes(self) -> int:
        """The size of a token in the file."""
        return np.dtype(NUMPY_DTYPES[self.dtype]).itemsize

    def add(self, documents: Sequence[Document]) -> None:
        """Write documents, each after a separator; raises NapkinError if the tokenizer gives them special tokens."""
        text_bytes = sum(len(utf8(document.text, f"'{document.name}'")) for document in documents)
        ids, counts = self.tokenizer.encode_documents([document.text for document in documents], threads=self.threads)
        starts = np.cumsum(counts) - counts
        wrong = (ids < 0) | (ids >= self.tokenizer.vocab_size) | (ids == self.separator)
        if wrong.any():
            document = documents[int(np.searchsorted(starts, wrong.argmax(), side="right")) - 1]
            raise NapkinError(
                f"'{document.name}' encodes to {SEPARATOR} or to a token outside the vocabulary of "
                f"{self.tokenizer.vocab_size}: the tokenizer must encode text as ordinary tokens"
            )
        begins = np.array([not document.continues for document in documents])
        self._write(np.insert(ids, starts[begins], self.separator))
        self.n_documents += int(begins.sum())
        self.text_bytes += text_bytes

    def finish(self, path: Path) -> Sidecar:
        """Write the last separator; returns the sidecar of the file, whose name will be `path`."""
        if not self.n_documents:
            raise NapkinError(f"there are no documents to write to '{path}': name a corpus that contains text")
        self._write(np.array([self.separator]))
        return Sidecar(
            format="napkin-tokens",
            version=1,
            dtype=self.dtype,
            tokens=self.n_tokens,
            documents=self.n_documents,
            text_bytes=self.text_bytes,
            vocab_size=self.tokenizer.vocab_size,
            tokenizer=self.tokenizer.fingerprint,
            separator=self.separator,
            sha256=self.checksum.hexdigest(),
        )

    def _write(self, ids: NDArray) -> None:
        data = ids.astype(NUMPY_DTYPES[self.dtype]).tobytes()
        self.file.write(data)
        self.checksum.update(data)
        self.n_tokens += len(ids)


def _encode(
    path: Path,
    file: BinaryIO,
    documents: Documents,
    tokenizer: Tokenizer,
    progress: Callable[[Path, int, int], None],
    threads: int,
    bytes_per_record: int,
) -> TokenWriter:
    state, remaining = _State(TokenWriter(file, tokenizer, threads)), iter(documents())
    if not _resume(_partial(path), state, remaining):
        file.seek(0)
        file.truncate()
        state, remaining = _State(TokenWriter(file, tokenizer, threads)), iter(documents())
    writer = state.writer
    recorded_bytes = writer.text_bytes
    for batch in _batches(remaining, min(bytes_per_record, _CHARACTERS_PER_BATCH)):
        writer.add(batch)
        state.add(batch)
        if writer.text_bytes - recorded_bytes >= bytes_per_record:
            _record(_partial(path), state)
            recorded_bytes = writer.text_bytes
        progress(path, writer.text_bytes, writer.n_tokens)
    # The next file may take long.
    _record(_partial(path), state)
    return writer


def _publish(path: Path, sidecar: bytes) -> None:
    partial = _partial(path)
    # The tokens get their name first, so a sidecar never exists beside incomplete tokens.
    with atomic_file(sidecar_path(path)) as sidecar_file:
        sidecar_file.write(sidecar)
        publish(partial, path)
    for leftover in (partial, sidecar_path(partial)):
        leftover.unlink(missing_ok=True)
    sync_folder(path.parent)


def _remove_unusable(paths: Iterable[Path]) -> None:
    """Remove partial files without a record, from which nothing can be resumed."""
    for partial in map(_partial, paths):
        if not sidecar_path(partial).exists():
            partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


@dataclass
class _State:
    """A writer, and the number and checksum of the documents, or parts of documents, that it has written."""

    writer: TokenWriter
    n_texts: int = 0
    text_hash: blake2b = field(default_factory=lambda: blake2b(digest_size=16))

    def add(self, documents: Iterable[Document]) -> None:
        """Count documents as written."""
        for document in documents:
            data = document.text.encode(errors="surrogatepass")
            self.text_hash.update((2 * len(data) + document.continues).to_bytes(8, "little"))
            self.text_hash.update(data)
            self.n_texts += 1


class _Record(msgspec.Struct, frozen=True):
    tokenizer: str
    texts: int
    documents: int
    tokens: int
    text_bytes: int
    text_hash: str


@contextlib.contextmanager
def _open(partial: Path) -> Iterator[BinaryIO]:
    try:
        with open(partial, "r+b" if partial.exists() else "x+b") as file:
            if not try_lock(file.fileno()):
                raise NapkinError(
                    f"'{partial}' is being written by another process: wait for it, or choose another name"
                )
            yield file
    except OSError as error:
        if error.filename not in (None, str(partial)):
            raise
        raise NapkinError(
            f"'{partial}' cannot be written ({error.strerror}): "
            "choose a folder that exists, is writable and has free space"
        ) from error


def _record(partial: Path, state: _State) -> None:
    writer = state.writer
    writer.file.flush()
    os.fsync(writer.file.fileno())
    record = _Record(
        tokenizer=writer.tokenizer.fingerprint,
        texts=state.n_texts,
        documents=writer.n_documents,
        tokens=writer.n_tokens,
        text_bytes=writer.text_bytes,
        text_hash=state.text_hash.hexdigest(),
    )
    atomic_write_bytes(sidecar_path(partial), msgspec.json.encode(record), overwrite=True)


def _resume(partial: Path, state: _State, documents: Iterator[Document]) -> bool:
    """Advance state and documents to the last record; False if there is none, or none for these documents."""
    writer = state.writer
    try:
        record = msgspec.json.decode(sidecar_path(partial).read_bytes(), type=_Record)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    size_bytes = record.tokens * writer.token_bytes
    if record.tokenizer != writer.tokenizer.fingerprint or os.fstat(writer.file.fileno()).st_size < size_bytes:
        return False
    state.add(itertools.islice(documents, record.texts))
    if state.n_texts != record.texts or state.text_hash.hexdigest() != record.text_hash:
        return False
    left = size_bytes
    while left:
        data = writer.file.read(min(left, _READ_BYTES))
        writer.checksum.update(data)
        left -= len(data)
    writer.file.truncate(size_bytes)
    writer.file.seek(size_bytes)
    writer.n_documents, writer.n_tokens, writer.text_bytes = record.documents, record.tokens, record.text_bytes
    return True


def _batches(documents: Iterable[Document], n_characters: int = _CHARACTERS_PER_BATCH) -> Iterator[list[Document]]:
    """Documents in groups of at least `n_characters`, to be encoded together."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= n_characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
