"""`NAME.tokens.json`, the sidecar of a token file: its counts, its tokenizer, and its checksums.

Version 2 has, besides the SHA-256 of the whole file, one of each block of 512 KiB, cut to 64 bits: 31 MB of sidecar for
1 TB of tokens. So a reader verifies the blocks that it reads, when it reads them. Version 1 has only the SHA-256 of the
whole file.
"""

import os
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from napkin.errors import CorruptFile, NapkinError
from napkin.files import regular

BLOCK_BYTES = 2**19
"""A block is what a single window costs to verify. Small ones make long sidecars; the kernel reads ahead 128 KiB."""
DIGEST_BYTES = 8
"""Bytes that are kept of the SHA-256 of a block: one damaged block in 2^64 goes unnoticed."""
NUMPY_DTYPES = {"uint16": "<u2", "uint32": "<u4"}

_OTHER_FIELDS_BYTES = 2**16
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Sidecar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """The description of a token file."""

    format: Literal["napkin-tokens"]
    version: Literal[1, 2]
    dtype: Literal["uint16", "uint32"]
    tokens: Annotated[int, msgspec.Meta(ge=1, le=2**60)]
    documents: Annotated[int, msgspec.Meta(ge=1, le=2**60)]
    text_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=2**32)]
    tokenizer: _Sha256
    separator: Annotated[int, msgspec.Meta(ge=0)]
    sha256: _Sha256
    block_bytes: Literal[524288] | None = None
    """Bytes of all blocks but the last, which may be shorter."""
    blocks: str = ""
    """The digests of the blocks, in hexadecimal."""

    def __post_init__(self) -> None:
        if self.dtype != dtype_name(self.vocab_size):
            raise ValueError(f"{self.dtype} is not the type for a vocabulary of {self.vocab_size}")
        if self.separator >= self.vocab_size:
            raise ValueError(f"separator {self.separator} is outside the vocabulary of {self.vocab_size}")
        if self.tokens <= self.documents:
            raise ValueError(f"{self.tokens} tokens cannot hold {self.documents} documents")
        if (self.version == 1) != (self.block_bytes is None):
            raise ValueError(f"version {self.version} {'has no' if self.version == 1 else 'needs'} block_bytes")
        expected = n_blocks(self.size_bytes) * DIGEST_BYTES * (self.version == 2)
        if len(self.blocks) != 2 * expected or len(self.block_digests) != expected:
            raise ValueError(f"blocks are not {2 * expected} hexadecimal digits")

    @property
    def size_bytes(self) -> int:
        """The size of the tokens on disk."""
        return self.tokens * np.dtype(NUMPY_DTYPES[self.dtype]).itemsize

    @cached_property
    def block_digests(self) -> bytes:
        """The digests of all blocks, one after the other; empty in version 1."""
        return bytes.fromhex(self.blocks)

    def to_json(self) -> bytes:
        """The contents of the sidecar file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


class _Format(msgspec.Struct):
    format: str


def _format_of(data: bytes) -> str | None:
    try:
        return msgspec.json.decode(data, type=_Format).format
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def read_sidecar(path: Path) -> Sidecar:
    """Read the sidecar of the token file `path`; of one that is longer than its tokens explain, only the beginning.

    Raises NapkinError where it is missing, CorruptFile where it does not describe a token file.
    """
    described = sidecar_path(path)
    try:
        with open(described, "rb", opener=regular) as file:
            limit = _OTHER_FIELDS_BYTES + 2 * DIGEST_BYTES * n_blocks(_size_bytes(path))
            data = file.read(limit + 1)
        if len(data) > limit:
            raise CorruptFile(
                f"'{described}' does not describe a token file (it is longer than {limit} bytes, the most for "
                f"'{path.name}'): make the tokens again"
            )
        if _format_of(data) == "napkin-chat-tokens":
            raise CorruptFile(f"'{path}' holds conversations, not documents: it is for `napkin tune sft`")
        return msgspec.json.decode(data, type=Sidecar)
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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # The name of an unknown field may be long, and have line breaks.
        why = " ".join(str(error).split())[:200]
        raise CorruptFile(f"'{described}' does not describe a token file ({why}): make the tokens again") from error


def _size_bytes(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise cannot_be_read(path, error) from error


def cannot_be_read(path: Path, error: OSError) -> NapkinError:
    """The error for tokens that the system does not give."""
    return NapkinError(f"'{path}' cannot be read ({error.strerror}): restore it or make it again")


def sidecar_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def dtype_name(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The type of token ids in a file for that vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def n_blocks(size_bytes: int) -> int:
    """The number of blocks of a file."""
    return -(-size_bytes // BLOCK_BYTES)


def block_digest(block: bytes | memoryview) -> bytes:
    return sha256(block).digest()[:DIGEST_BYTES]


class BlockChecksums:
    """The digests of the blocks of a file that is written in pieces of any size."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._block = sha256()
        self._missing = BLOCK_BYTES

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the file."""
        left = np.frombuffer(data, np.uint8).data if len(data) else memoryview(b"")
        while len(left) >= self._missing:
            self._block.update(left[: self._missing])
            left = left[self._missing :]
            self._digests += self._block.digest()[:DIGEST_BYTES]
            self._block, self._missing = sha256(), BLOCK_BYTES
        self._block.update(left)
        self._missing -= len(left)

    def hexdigest(self) -> str:
        """The digests so far; the last block may be incomplete."""
        last = self._block.digest()[:DIGEST_BYTES] if self._missing < BLOCK_BYTES else b""
        return (self._digests + last).hex()
