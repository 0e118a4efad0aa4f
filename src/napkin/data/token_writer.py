"""Writing documents as tokens to a file, in batches: reading, encoding and writing go on at the same time."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from napkin.data.curated_corpus import Document
from napkin.data.sidecar import (
    BLOCK_BYTES,
    NUMPY_DTYPES,
    BlockChecksums,
    Sidecar,
    dtype_name,
    read_sidecar,
    sidecar_path,
)
from napkin.data.token_file import SEPARATOR, TokenFile
from napkin.errors import NapkinError
from napkin.files import StrPath, already_exists, atomic_file
from napkin.tokenizer.base import Tokenizer

# Text that is encoded at once.
BYTES_PER_BATCH = 2**22
# Of fewer documents per token, the ids of one after the other are copied; of more, all are sorted in at once.
_TOKENS_PER_DOCUMENT = 512

_Batch = TypeVar("_Batch")
_Encoded = TypeVar("_Encoded")


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
        for _ in pipeline(in_batches(documents), writer.encode, lambda _, encoded: writer.write(encoded)):
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
    """The sidecar of a token file that this tokenizer has made; of others it is known that their tokens differ."""
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

    def encode(self, documents: Sequence[Document]) -> EncodedDocuments:
        """Encode documents without writing them."""
        texts = [document.data for document in documents]
        data = b"".join(texts)
        ids, counts = self.tokenizer.encode_utf8(data, list(accumulate(map(len, texts))), threads=self.threads)
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


def in_batches(documents: Iterable[Document], n_bytes: int = BYTES_PER_BATCH) -> Iterator[list[Document]]:
    """Documents in groups of at least `n_bytes`, to be encoded together."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.data)
        if size >= n_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def pipeline(
    batches: Iterator[_Batch], encode: Callable[[_Batch], _Encoded], write: Callable[[_Batch, _Encoded], None]
) -> Iterator[_Batch]:
    """Encode and write each batch in order, and yield it once it is written.

    The following batch is read, and the preceding one written, each by its own thread, while one is encoded. If any of
    the three raises, batches that were encoded before are written first.
    """
    with ThreadPoolExecutor(1) as reading, ThreadPoolExecutor(1) as writing:
        upcoming = reading.submit(next, batches, None)
        written: tuple[_Batch, Future[None]] | None = None
        while (batch := upcoming.result()) is not None:
            upcoming = reading.submit(next, batches, None)
            encoded = encode(batch)
            if written is not None:
                written[1].result()
                yield written[0]
            written = batch, writing.submit(write, batch, encoded)
            # The next one needs the memory.
            del batch, encoded
        if written is not None:
            written[1].result()
            yield written[0]
