"""Writing documents as tokens to files, in batches: reading, encoding and writing go on at the same time.

`write_token_file` writes one file. `write_token_files` and `write_token_files_together` write several, resumable after
a crash: while documents are encoded, `.NAME.partial` holds the tokens so far, and `.NAME.partial.json` records how many
documents they cover, a checksum of the text of those, and the tokenizer. Tokens are synced to disk before they are
recorded, so after a kill at any moment the record is valid. The next call reads the recorded documents again and
continues after them if their text is the same; if not, or with another tokenizer, it starts over.
"""

import contextlib
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from napkin.data.corpus import Document
from napkin.data.token_file import (
    BLOCK_BYTES,
    NUMPY_DTYPES,
    SEPARATOR,
    BlockChecksums,
    Sidecar,
    TokenFile,
    dtype_name,
    read_sidecar,
    sidecar_path,
)
from napkin.errors import NapkinError
from napkin.files import (
    StrPath,
    already_exists,
    atomic_file,
    atomic_write_bytes,
    publish,
    read_bytes,
    remove_abandoned,
    sync_folder,
    try_lock,
)
from napkin.tokenizer.base import Tokenizer

# Text that is encoded at once.
BYTES_PER_BATCH = 2**22
# Batches that are encoded at the same time: one thread does not read faster than so many encode.
_ENCODERS = 4
_LARGE_BYTES = 2**25
# With more tokens per document than this, ids are copied document by document; with fewer, all are placed by one sort.
_TOKENS_PER_DOCUMENT = 512

_Target = TypeVar("_Target")
_Batch = TypeVar("_Batch")
_Encoded = TypeVar("_Encoded")
Documents = Callable[[], Iterable[Document]]
"""Iterates over the same documents each time it is called."""
Routed = Callable[[], Iterable[tuple[Path, Document]]]
"""Iterates over the same documents each time it is called, each with the file that it is for."""
Progress = Callable[[Path, int, int], None]
"""Called with a file, the bytes of text in it and its number of tokens."""

# Text between two records: a fraction of a second of encoding.
_BYTES_PER_RECORD = 2**25
_READ_BYTES = 2**22

_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


def write_token_file(
    path: StrPath,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    progress: Callable[[int, int], None] | None = None,
    *,
    threads: int = 1,
) -> TokenFile:
    """Tokenize `documents` into a new token file at `path` and open it, in memory of the largest document, or of a few
    batches of 4 MB.

    After every few documents `progress(text_bytes, n_tokens)` is called with the totals so far. A token file that holds
    the tokens of the same documents already is opened as it is. Raises NapkinError if `path` or its sidecar is another
    file, if there are no documents, or if the tokenizer has no `<|endoftext|>`.
    """
    path = Path(path)

    def encode_into(file: BinaryIO) -> Sidecar:
        writer = TokenWriter(file, tokenizer, threads)
        batches = _batches(((writer, document) for document in documents), BYTES_PER_BATCH)
        steps = lambda batch: writer.encode_beside_others(batch[1]), lambda _, encoded: writer.write(encoded)
        for _ in pipeline(batches, *steps, threads=threads):
            if progress is not None:
                progress(writer.text_bytes, writer.n_tokens)
        return writer.finish(path)

    if (existing := _same_tokenizer_at(path, tokenizer)) is not None:
        with open(os.devnull, "wb") as nowhere:
            if encode_into(nowhere) != existing:
                raise already_exists(path)
        return TokenFile.open(path, verify=True)
    # The inner file gets its name first, so a sidecar never exists beside incomplete tokens.
    with atomic_file(sidecar_path(path)) as sidecar_file, atomic_file(path) as file:
        sidecar_file.write(encode_into(file).to_json())
        sidecar_file.flush()
    return TokenFile.open(path)


def _same_tokenizer_at(path: Path, tokenizer: Tokenizer) -> Sidecar | None:
    """The sidecar of a token file that was made with this tokenizer; None for others, whose tokens differ."""
    try:
        existing = read_sidecar(path)
    except NapkinError:
        return None
    return existing if path.exists() and existing.tokenizer == tokenizer.fingerprint else None


@dataclass(frozen=True, slots=True)
class EncodedDocuments:
    """The ids of some documents, each document after a separator."""

    ids: NDArray
    n_documents: int
    text_bytes: int


class TokenWriter:
    """Writes documents as tokens to an open file, and computes their counts and checksums.

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
        self._checksum, self._blocks = sha256(), BlockChecksums()
        self.n_documents = self.n_tokens = self.text_bytes = 0

    @property
    def token_bytes(self) -> int:
        """The size of a token in the file."""
        return np.dtype(NUMPY_DTYPES[self.dtype]).itemsize

    def add(self, documents: Sequence[Document]) -> None:
        """Write documents, each after a separator; raises NapkinError if the tokenizer gives them special tokens."""
        self.write(self.encode(documents))

    def encode_beside_others(self, documents: Sequence[Document]) -> EncodedDocuments:
        """Encode documents without writing them, in one thread but for a text that could not be split, while other
        documents are encoded."""
        is_large = sum(len(document.data) for document in documents) > _LARGE_BYTES
        return self.encode(documents, threads=None if is_large else 1)

    def encode(self, documents: Sequence[Document], *, threads: int | None = None) -> EncodedDocuments:
        """Encode documents without writing them, in the writer's threads or as many as are given."""
        texts = [document.data for document in documents]
        data = b"".join(texts)
        threads = self.threads if threads is None else threads
        ids, counts = self.tokenizer.encode_utf8(data, list(accumulate(map(len, texts))), threads=threads)
        starts = np.cumsum(counts) - counts
        if _any_outside(ids, self.tokenizer.vocab_size) or (ids == self.separator).any():
            wrong = (ids < 0) | (ids >= self.tokenizer.vocab_size) | (ids == self.separator)
            document = documents[int(np.searchsorted(starts, wrong.argmax(), side="right")) - 1]
            raise NapkinError(
                f"'{document.name}' encodes to {SEPARATOR} or to a token outside the vocabulary of "
                f"{self.tokenizer.vocab_size}: the tokenizer must encode text as ordinary tokens"
            )
        begins = starts[[not document.continues for document in documents]]
        return EncodedDocuments(self._separated(ids, begins), len(begins), len(data))

    def write(self, encoded: EncodedDocuments) -> None:
        """Write documents that `encode` has encoded."""
        self._write(encoded.ids)
        self.n_documents += encoded.n_documents
        self.text_bytes += encoded.text_bytes

    def finish(self, path: Path) -> Sidecar:
        """Write the last separator; returns the sidecar of the file, whose name will be `path`."""
        if not self.n_documents:
            raise NapkinError(f"there are no documents to write to '{path}': name a corpus that contains text")
        self._write(self._separated(np.empty(0, self.dtype), np.array([0])))
        return Sidecar(
            format="napkin-tokens",
            version=2,
            dtype=self.dtype,
            tokens=self.n_tokens,
            documents=self.n_documents,
            text_bytes=self.text_bytes,
            vocab_size=self.tokenizer.vocab_size,
            tokenizer=self.tokenizer.fingerprint,
            separator=self.separator,
            sha256=self._checksum.hexdigest(),
            block_bytes=BLOCK_BYTES,
            blocks=self._blocks.hexdigest(),
        )

    def add_to_checksums(self, data: bytes | memoryview) -> None:
        """Add bytes to the checksums of the file, which has them already."""
        self._checksum.update(data)
        self._blocks.update(data)

    def _separated(self, ids: NDArray, begins: NDArray) -> NDArray:
        """The ids as they are stored, with a separator before each of the offsets `begins`."""
        separated = np.empty(len(ids) + len(begins), NUMPY_DTYPES[self.dtype])
        places = begins + np.arange(len(begins))
        if len(begins) * _TOKENS_PER_DOCUMENT > len(ids):
            is_ordinary = np.ones(len(separated), bool)
            is_ordinary[places] = False
            separated[is_ordinary] = ids
        else:
            edges = [0, *begins.tolist(), len(ids)]
            for n_before, (start, end) in enumerate(pairwise(edges)):
                separated[start + n_before : end + n_before] = ids[start:end]
        separated[places] = self.separator
        return separated

    def _write(self, ids: NDArray) -> None:
        self.file.write(ids.data)
        self.add_to_checksums(ids.data)
        self.n_tokens += len(ids)


def _any_outside(ids: NDArray, vocab_size: int) -> bool:
    return bool(len(ids)) and (int(ids.max()) >= vocab_size or (ids.dtype.kind != "u" and int(ids.min()) < 0))


def pipeline(
    batches: Iterator[_Batch],
    encode: Callable[[_Batch], _Encoded],
    write: Callable[[_Batch, _Encoded], None],
    *,
    threads: int = 1,
) -> Iterator[_Batch]:
    """Encode up to `threads` batches, but not more than four, at a time; write all in order, and yield each once it is
    written.

    The following batch is read, and a preceding one written, each by its own thread, while others are encoded. If any
    of the three raises, batches that were encoded before are written first.
    """
    threads = min(threads, _ENCODERS)
    with (
        ThreadPoolExecutor(1) as reading,
        ThreadPoolExecutor(threads) as encoding,
        ThreadPoolExecutor(1) as writing,
    ):
        encoded: deque[tuple[_Batch, Future[_Encoded]]] = deque()
        written: tuple[_Batch, Future[None]] | None = None
        upcoming, at_end = reading.submit(next, batches, None), False
        while not at_end or encoded:
            # One more than there are threads, so that none of them waits while a batch is written.
            while not at_end and len(encoded) <= threads:
                batch = None if upcoming.exception() else upcoming.result()
                at_end = batch is None
                if batch is not None:
                    upcoming = reading.submit(next, batches, None)
                    encoded.append((batch, encoding.submit(encode, batch)))
            if written is not None:
                written[1].result()
                yield written[0]
                written = None
            if encoded:
                batch, ids = encoded.popleft()
                written = batch, writing.submit(write, batch, ids.result())
                # The next ones need the memory.
                del batch, ids
        if written is not None:
            written[1].result()
            yield written[0]
        # Raises what reading has raised.
        upcoming.result()


def write_token_files(
    documents: Mapping[Path, Documents],
    tokenizer: Tokenizer,
    progress: Progress,
    *,
    threads: int = 1,
    bytes_per_record: int = _BYTES_PER_RECORD,
) -> list[TokenFile]:
    """Write several token files like `write_token_file`, one after the other, resumable after a crash.

    All files get their names after the last one is written. `progress(path, text_bytes, n_tokens)` continues from the
    totals of an interrupted call. Raises the same errors as `write_token_file`; after an error, as after a crash, the
    tokens so far are kept for the next call. Only one process at a time can write a file.
    """

    def all_for(path: Path, documents: Documents) -> Routed:
        return lambda: ((path, document) for document in documents())

    passes = [([path], all_for(path, each)) for path, each in documents.items()]
    return _write(passes, tokenizer, progress, threads, bytes_per_record)


def write_token_files_together(
    paths: Sequence[Path],
    documents: Routed,
    tokenizer: Tokenizer,
    progress: Progress,
    *,
    threads: int = 1,
    bytes_per_record: int = _BYTES_PER_RECORD,
) -> list[TokenFile]:
    """Write several token files like `write_token_files`, in a single pass over documents that are for any of them."""
    return _write([(paths, documents)], tokenizer, progress, threads, bytes_per_record)


def _write(
    passes: Sequence[tuple[Sequence[Path], Routed]],
    tokenizer: Tokenizer,
    progress: Progress,
    threads: int,
    bytes_per_record: int,
) -> list[TokenFile]:
    paths = [path for some, _ in passes for path in some]
    take_back_unfinished(paths)
    for path in paths:
        for target in (path, sidecar_path(path)):
            if os.path.lexists(target):
                raise already_exists(target)
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_unusable, paths)
        files = {path: stack.enter_context(_open(_partial(path))) for path in paths}
        sidecars: dict[Path, bytes] = {}
        for some, documents in passes:
            partials = None
            while partials is None:
                started = {path: _PartialFile(path, files[path], tokenizer, threads) for path in some}
                with contextlib.suppress(_Changed):
                    _encode(started, documents, progress, threads, bytes_per_record)
                    partials = started
            for path, partial in partials.items():
                sidecars[path] = partial.writer.finish(path).to_json()
                files[path].flush()
                os.fsync(files[path].fileno())
        for path, sidecar in sidecars.items():
            _publish(path, sidecar)
        _remove_partials(paths)
    return [TokenFile.open(path) for path in paths]


class _Changed(Exception):
    """Documents are not those of a record, which has been removed."""


class _Record(msgspec.Struct, frozen=True):
    tokenizer: str
    texts: _Natural
    documents: _Natural
    tokens: _Natural
    text_bytes: _Natural
    text_hash: str


class _PartialFile:
    """A file being written: its writer, and the number and checksum of the documents, or parts of documents, in it.

    Documents that an earlier call has recorded are skipped while they are the same; the writer begins after them.
    """

    def __init__(self, path: Path, file: BinaryIO, tokenizer: Tokenizer, threads: int) -> None:
        self.path = path
        self.partial = _partial(path)
        self.file = file
        self.writer = TokenWriter(file, tokenizer, threads)
        self.n_texts = 0
        self.text_hash = blake2b(digest_size=16)
        self.has_changed = False
        self.record = self._usable_record()
        # Up to here the reading thread skips documents; from here on the writing thread counts them.
        self.is_continuing = self.record is None or not self.record.texts
        if self.is_continuing:
            self._begin_at(0)

    def skips(self, document: Document) -> bool:
        """True if the document is in the file already. Raises _Changed if those before it are not."""
        record = self.record
        if self.is_continuing or record is None:
            return False
        self.count([document])
        if self.n_texts == record.texts:
            if self.text_hash.hexdigest() != record.text_hash:
                self.forget()
            self._continue_after(record)
        return True

    def check_complete(self) -> None:
        """Raise _Changed if there were fewer documents than are recorded."""
        if not self.is_continuing:
            self.forget()

    def count(self, documents: Iterable[Document]) -> None:
        """Count documents as written."""
        entries = [
            (2 * len(document.data) + document.continues).to_bytes(8, "little") + document.digest
            for document in documents
        ]
        self.text_hash.update(b"".join(entries))
        self.n_texts += len(entries)

    def write(self, documents: Sequence[Document], encoded: EncodedDocuments) -> None:
        """Write documents, and count them."""
        self.writer.write(encoded)
        self.count(documents)
        self.has_changed = True

    def save_record(self) -> None:
        """Record what is written so far."""
        self.has_changed = False
        self.file.flush()
        os.fsync(self.file.fileno())
        writer = self.writer
        record = _Record(
            tokenizer=writer.tokenizer.fingerprint,
            texts=self.n_texts,
            documents=writer.n_documents,
            tokens=writer.n_tokens,
            text_bytes=writer.text_bytes,
            text_hash=self.text_hash.hexdigest(),
        )
        atomic_write_bytes(sidecar_path(self.partial), msgspec.json.encode(record), overwrite=True)

    def forget(self) -> None:
        """Remove the record, and raise _Changed."""
        sidecar_path(self.partial).unlink(missing_ok=True)
        raise _Changed

    def _usable_record(self) -> _Record | None:
        try:
            record = msgspec.json.decode(read_bytes(sidecar_path(self.partial)), type=_Record)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        size_bytes = record.tokens * self.writer.token_bytes
        if record.tokenizer != self.writer.tokenizer.fingerprint or os.fstat(self.file.fileno()).st_size < size_bytes:
            return None
        return record

    def _begin_at(self, size_bytes: int) -> None:
        self.file.truncate(size_bytes)
        self.file.seek(size_bytes)

    def _continue_after(self, record: _Record) -> None:
        writer = self.writer
        left = size_bytes = record.tokens * writer.token_bytes
        self.file.seek(0)
        while left:
            data = self.file.read(min(left, _READ_BYTES))
            writer.add_to_checksums(data)
            left -= len(data)
        self._begin_at(size_bytes)
        writer.n_documents, writer.n_tokens, writer.text_bytes = record.documents, record.tokens, record.text_bytes
        self.is_continuing = True


def _encode(
    partials: Mapping[Path, _PartialFile], documents: Routed, progress: Progress, threads: int, bytes_per_record: int
) -> None:
    unrecorded = 0

    def write(batch: tuple[_PartialFile, list[Document]], encoded: EncodedDocuments) -> None:
        nonlocal unrecorded
        partial, of_batch = batch
        partial.write(of_batch, encoded)
        unrecorded += encoded.text_bytes
        if unrecorded >= bytes_per_record:
            for partial in partials.values():
                if partial.has_changed:
                    partial.save_record()
            unrecorded = 0

    def remaining() -> Iterator[tuple[_PartialFile, Document]]:
        for path, document in documents():
            partial = partials[path]
            if not partial.skips(document):
                yield partial, document
        for partial in partials.values():
            partial.check_complete()

    batches = _batches(remaining(), min(bytes_per_record, BYTES_PER_BATCH))

    def encode(batch: tuple[_PartialFile, list[Document]]) -> EncodedDocuments:
        return batch[0].writer.encode_beside_others(batch[1])

    for partial, _ in pipeline(batches, encode, write, threads=threads):
        progress(partial.path, partial.writer.text_bytes, partial.writer.n_tokens)
    # The next pass may take long.
    for partial in partials.values():
        partial.save_record()


def _batches(documents: Iterable[tuple[_Target, Document]], n_bytes: int) -> Iterator[tuple[_Target, list[Document]]]:
    """Documents for the same target in groups of at least `n_bytes`, to be encoded together."""
    batches: defaultdict[_Target, list[Document]] = defaultdict(list)
    sizes: defaultdict[_Target, int] = defaultdict(int)
    for target, document in documents:
        batches[target].append(document)
        sizes[target] += len(document.data)
        if sizes[target] >= n_bytes:
            yield target, batches.pop(target)
            sizes[target] = 0
    yield from batches.items()


def _publish(path: Path, sidecar: bytes) -> None:
    # The tokens get their name first, so a sidecar never exists beside incomplete tokens.
    with atomic_file(sidecar_path(path)) as sidecar_file:
        sidecar_file.write(sidecar)
        publish(_partial(path), path)


def _remove_partials(paths: Iterable[Path]) -> None:
    """Remove the partial files and their records, when all files have their names."""
    for path in paths:
        for leftover in (_partial(path), sidecar_path(_partial(path))):
            leftover.unlink(missing_ok=True)
        sync_folder(path.parent)


def take_back_unfinished(paths: Sequence[Path]) -> None:
    """Undo what a process did that was killed while it gave the files their names, so that it can be done again."""
    for path in paths:
        remove_abandoned(sidecar_path(path))
        remove_abandoned(sidecar_path(_partial(path)))
    if not any(_partial(path).exists() or sidecar_path(_partial(path)).exists() for path in paths):
        return
    if all(target.exists() for path in paths for target in (path, sidecar_path(path))):
        _remove_partials(paths)
        return
    for path in paths:
        # Where hard links are supported, the tokens then have two names.
        if path.exists() and _partial(path).exists() and path.samefile(_partial(path)):
            with _open(_partial(path)):
                sidecar_path(path).unlink(missing_ok=True)
                path.unlink()


def _remove_unusable(paths: Iterable[Path]) -> None:
    """Remove partial files without a record, from which nothing can be resumed."""
    for partial in map(_partial, paths):
        if not sidecar_path(partial).exists():
            partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


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
