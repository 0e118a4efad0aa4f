"""Token files: a corpus as token ids on disk, memory-mapped instead of read.

`NAME.tokens` contains the ids only, as little-endian uint16 if the vocabulary allows it, otherwise uint32;
`NAME.tokens.json`, its sidecar, describes them. Each document is preceded by the separator, and one more is at the end.
The sidecar gets its name last: tokens without one cannot be opened.
"""

import mmap
import os
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath, read_bytes, regular

TokenArray = NDArray[np.uint16] | NDArray[np.uint32]

SEPARATOR = "<|endoftext|>"

NUMPY_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_CHUNK_TOKENS = 2**20

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class TokenFile:
    """A token file opened for reading, by `TokenFile.open`.

    `tokens` is the memory-mapped, read-only array of all ids, including separators; `text_bytes` is the number of UTF-8
    bytes of the documents' text, excluding separators.
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

    def __init__(self, path: Path, tokens: TokenArray, sidecar: "Sidecar") -> None:
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
    def open(
        cls,
        path: StrPath,
        *,
        tokenizer_fingerprint: str | None = None,
        verify: bool = False,
        in_memory: bool = False,
    ) -> "TokenFile":
        """Map the token file at `path` into memory. Checks its length, and with `verify` its checksum.

        With `in_memory` it is read instead of mapped: a file that is truncated later cannot end the process.
        Raises NapkinError if one of the two files is missing or a tokenizer other than `tokenizer_fingerprint` made the
        tokens, and CorruptFile if the file was altered.
        """
        path = Path(path)
        sidecar = _read_sidecar(path)
        if tokenizer_fingerprint is not None and tokenizer_fingerprint != sidecar.tokenizer:
            raise NapkinError(
                f"'{path}' was made by another tokenizer: expects {sidecar.tokenizer}, got "
                f"{tokenizer_fingerprint}: use the one it expects or encode the text again under another name"
            )
        token_file = cls(path, _map_tokens(path, sidecar, in_memory), sidecar)
        if verify:
            token_file.verify()
        return token_file

    def verify(self) -> None:
        """Read all tokens; raise CorruptFile unless checksum, range and number of separators are right."""
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


class Sidecar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a token file."""

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
        if self.dtype != dtype_name(self.vocab_size):
            raise ValueError(f"{self.dtype} is not the type for a vocabulary of {self.vocab_size}")
        if self.separator >= self.vocab_size:
            raise ValueError(f"separator {self.separator} is outside the vocabulary of {self.vocab_size}")
        if self.tokens <= self.documents:
            raise ValueError(f"{self.tokens} tokens cannot hold {self.documents} documents")

    def to_json(self) -> bytes:
        """The contents of the sidecar file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def _read_sidecar(path: Path) -> Sidecar:
    described = sidecar_path(path)
    try:
        return msgspec.json.decode(read_bytes(described), type=Sidecar)
    except FileNotFoundError:
        if not path.exists():
            raise NapkinError(
                f"'{path}' does not exist: name a token file, or make one with `napkin tokenizer encode`"
            ) from None
        raise NapkinError(
            f"'{described}' is missing, without it '{path}' cannot be read: "
            "restore it, or remove the tokens and make them again with `napkin tokenizer encode`"
        ) from None
    except OSError as error:
        raise NapkinError(f"'{described}' cannot be read ({error.strerror}): make it readable") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptFile(f"'{described}' does not describe a token file ({error}): make the tokens again") from error


def _map_tokens(path: Path, sidecar: Sidecar, in_memory: bool) -> TokenArray:
    dtype = np.dtype(NUMPY_DTYPES[sidecar.dtype])
    expected_bytes = sidecar.tokens * dtype.itemsize
    try:
        with open(path, "rb", opener=regular) as file:
            # Both checks use the same open file, even if another one takes its name meanwhile.
            content = file.read() if in_memory else None
            size_bytes = os.fstat(file.fileno()).st_size if content is None else len(content)
            if size_bytes != expected_bytes:
                raise CorruptFile(
                    f"'{path}' is {size_bytes} bytes long, its sidecar says {expected_bytes} "
                    f"({sidecar.tokens} tokens): copy it again or make the tokens again"
                )
            if content is None:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): restore it or make it again") from error
    return np.frombuffer(content, dtype)


def sidecar_path(path: Path) -> Path:
    """The path of the sidecar of a token file."""
    return path.with_name(path.name + ".json")


def dtype_name(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The type of token ids in a file for that vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"
