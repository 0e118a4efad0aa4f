"""Token files: a corpus as token ids on disk, mapped into memory instead of read.

`NAME.tokens` holds the ids and nothing else, little-endian uint16 where the vocabulary allows it and uint32
where not; `NAME.tokens.json` says what they are. Each document is preceded by the separator, and one more
stands at the end. The sidecar gets its name last: tokens without one are not opened.
"""

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from napkin.data.corpus import Document
from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath, atomic_file
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.texts import utf8

TokenArray = NDArray[np.uint16] | NDArray[np.uint32]

SEPARATOR = "<|endoftext|>"

_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_CHUNK_TOKENS = 2**20
# What is encoded at a time.
CHARACTERS_A_BATCH = 2**22

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class TokenFile:
    """A token file opened for reading; `TokenFile.open` is the way to one.

    `tokens` is the mapped read-only array of all ids, separators included; `text_bytes` counts the UTF-8
    bytes of the documents' text, separators not included.
    """

    path: Path
    tokens: TokenArray
    n_tokens: int
    n_documents: int
    text_bytes: int
    vocab_size: int
    separator: int
    tokenizer_fingerprint: str
    sha256: str

    def __init__(self, path: Path, tokens: TokenArray, sidecar: "_Sidecar") -> None:
        self.path = path
        self.tokens = tokens
        self.n_tokens = sidecar.tokens
        self.n_documents = sidecar.documents
        self.text_bytes = sidecar.text_bytes
        self.vocab_size = sidecar.vocab_size
        self.separator = sidecar.separator
        self.tokenizer_fingerprint = sidecar.tokenizer
        self.sha256 = sidecar.sha256

    @classmethod
    def open(cls, path: StrPath, *, tokenizer_fingerprint: str | None = None, verify: bool = False) -> "TokenFile":
        """Map the token file at `path` into memory; its length is checked, with `verify` every bit.

        Raises NapkinError where one of the two files is missing or the tokens were made by a tokenizer other
        than `tokenizer_fingerprint`, CorruptFile where they are not as they were written.
        """
        path = Path(path)
        sidecar = _read_sidecar(path)
        if tokenizer_fingerprint is not None and tokenizer_fingerprint != sidecar.tokenizer:
            raise NapkinError(
                f"'{path}' was made by another tokenizer: expects {sidecar.tokenizer}, got "
                f"{tokenizer_fingerprint}: use the one it expects or make the tokens again under another name"
            )
        token_file = cls(path, _map_tokens(path, sidecar), sidecar)
        if verify:
            token_file.verify()
        return token_file

    def verify(self) -> None:
        """Read all tokens and raise CorruptFile unless checksum, range and separators are right."""
        checksum, n_separators, largest = sha256(), 0, 0
        for start in range(0, self.n_tokens, _CHUNK_TOKENS):
            chunk = self.tokens[start : start + _CHUNK_TOKENS]
            checksum.update(chunk.tobytes())
            n_separators += int(np.count_nonzero(chunk == self.separator))
            largest = max(largest, int(chunk.max()))
        if checksum.hexdigest() != self.sha256:
            raise CorruptFile(
                f"'{self.path}' was altered: its SHA-256 is {checksum.hexdigest()}, its sidecar says "
                f"{self.sha256}: make the tokens again"
            )
        if largest >= self.vocab_size:
            raise CorruptFile(
                f"'{self.path}' holds token {largest}, its vocabulary ends at {self.vocab_size - 1}: "
                "make the tokens again"
            )
        if n_separators != self.n_documents + 1:
            raise CorruptFile(
                f"'{self.path}' holds {n_separators} separators, its {self.n_documents} documents need "
                f"{self.n_documents + 1}: make the tokens again"
            )


def write_token_file(
    path: StrPath,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    progress: Callable[[int, int], None] | None = None,
    *,
    threads: int = 1,
) -> TokenFile:
    """Tokenize `documents` into a new token file at `path` and open it; memory stays that of the largest document, or
    of a few megabytes.

    After every few documents `progress(text_bytes, n_tokens)` is told the totals so far. Raises NapkinError where
    one of the two files exists, where there are no documents, or where the tokenizer has no `<|endoftext|>`.
    """
    path = Path(path)
    # The inner file gets its name first, so that a sidecar never stands beside tokens that are not complete.
    with atomic_file(sidecar_path(path)) as sidecar_file, atomic_file(path) as file:
        sidecar = _write_tokens(path, file, documents, tokenizer, progress, threads)
        sidecar_file.write(sidecar.to_json())
        sidecar_file.flush()
    return TokenFile.open(path)


class _Sidecar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal["napkin-tokens"]
    version: Literal[1]
    dtype: Literal["uint16", "uint32"]
    tokens: _Positive
    documents: _Positive
    text_bytes: _Natural
    vocab_size: _Positive
    tokenizer: str
    separator: _Natural
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]

    def __post_init__(self) -> None:
        if self.dtype != _dtype_name(self.vocab_size):
            raise ValueError(f"{self.dtype} is not the type of a vocabulary of {self.vocab_size}")
        if self.separator >= self.vocab_size:
            raise ValueError(f"separator {self.separator} is outside the vocabulary of {self.vocab_size}")
        if self.tokens <= self.documents:
            raise ValueError(f"{self.tokens} tokens cannot hold {self.documents} documents")

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def _write_tokens(
    path: Path,
    file: BinaryIO,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    progress: Callable[[int, int], None] | None,
    threads: int,
) -> _Sidecar:
    writer = TokenWriter(file, tokenizer, threads)
    for batch in batches_of(documents):
        writer.add(batch)
        if progress is not None:
            progress(writer.text_bytes, writer.n_tokens)
    return writer.finish(path)


def batches_of(documents: Iterable[Document], n_characters: int = CHARACTERS_A_BATCH) -> Iterator[list[Document]]:
    """Documents in groups of at least so many characters, to be encoded together."""
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


class TokenWriter:
    """Writes documents as tokens to an open file, counting and checksumming what it writes.

    Raises NapkinError where the tokenizer has no `<|endoftext|>`.
    """

    def __init__(self, file: BinaryIO, tokenizer: Tokenizer, threads: int = 1) -> None:
        separator = tokenizer.special_tokens.get(SEPARATOR)
        if separator is None:
            raise NapkinError(f"the tokenizer has no {SEPARATOR} to divide documents: make one that has it")
        self.file = file
        self.tokenizer = tokenizer
        self.separator = separator
        self.dtype: Literal["uint16", "uint32"] = _dtype_name(tokenizer.vocab_size)
        self.threads = threads
        self.checksum = sha256()
        self.n_documents = self.n_tokens = self.text_bytes = 0

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes."""
        return np.dtype(_DTYPES[self.dtype]).itemsize

    def add(self, documents: Sequence[Document]) -> None:
        """Write documents, each behind a separator; raises NapkinError where their tokens are not ordinary ones."""
        text_bytes = sum(len(utf8(document.text, f"'{document.name}'")) for document in documents)
        ids, counts = self.tokenizer.encode_documents([document.text for document in documents], threads=self.threads)
        starts = np.cumsum(counts) - counts
        wrong = (ids < 0) | (ids >= self.tokenizer.vocab_size) | (ids == self.separator)
        if wrong.any():
            document = documents[int(np.searchsorted(starts, wrong.argmax(), side="right")) - 1]
            raise NapkinError(
                f"'{document.name}' encodes to {SEPARATOR} or to a token outside the vocabulary of "
                f"{self.tokenizer.vocab_size}: the tokenizer must keep ordinary text to ordinary tokens"
            )
        begins = np.array([not document.continues for document in documents])
        self._write(np.insert(ids, starts[begins], self.separator))
        self.n_documents += int(begins.sum())
        self.text_bytes += text_bytes

    def finish(self, path: Path) -> "_Sidecar":
        """Write the last separator; what the sidecar of the file says, whose name will be `path`."""
        if not self.n_documents:
            raise NapkinError(f"there are no documents to write to '{path}': name a corpus that holds text")
        self._write(np.array([self.separator]))
        return _Sidecar(
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
        data = ids.astype(_DTYPES[self.dtype]).tobytes()
        self.file.write(data)
        self.checksum.update(data)
        self.n_tokens += len(ids)


def _read_sidecar(path: Path) -> _Sidecar:
    described = sidecar_path(path)
    try:
        return msgspec.json.decode(described.read_bytes(), type=_Sidecar)
    except FileNotFoundError:
        if not path.exists():
            raise NapkinError(f"'{path}' does not exist: name a token file or make one") from None
        raise NapkinError(
            f"'{described}' is missing, without it '{path}' cannot be read: "
            "put it back, or remove the tokens and make them again; a text becomes tokens with `napkin "
            "tokenizer encode`"
        ) from None
    except OSError as error:
        raise NapkinError(f"'{described}' cannot be read ({error.strerror}): make it readable") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptFile(f"'{described}' does not describe a token file ({error}): make the tokens again") from error


def _map_tokens(path: Path, sidecar: _Sidecar) -> TokenArray:
    dtype = np.dtype(_DTYPES[sidecar.dtype])
    expected_bytes = sidecar.tokens * dtype.itemsize
    try:
        with open(path, "rb") as file:
            # Size and map are of the same open file, whatever happens to its name meanwhile.
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != expected_bytes:
                raise CorruptFile(
                    f"'{path}' is {size_bytes} bytes long, its sidecar says {expected_bytes} "
                    f"({sidecar.tokens} tokens): copy it again or make the tokens again"
                )
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): put it back or make it again") from error
    return np.frombuffer(mapped, dtype)


def sidecar_path(path: Path) -> Path:
    """Where the description of a token file is."""
    return path.with_name(path.name + ".json")


def _dtype_name(vocab_size: int) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab_size <= 2**16 else "uint32"
