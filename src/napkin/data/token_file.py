"""Token files: a corpus as token ids on disk, memory-mapped instead of read.

`NAME.tokens` contains the ids only, as little-endian uint16 if the vocabulary allows it, otherwise uint32;
`NAME.tokens.json`, its sidecar, has its counts, its tokenizer and its checksums. Each document is preceded by the
separator, and one more is at the end. The sidecar gets its name last: tokens without one cannot be opened.

Version 2 of the sidecar has, besides the SHA-256 of the whole file, one of each block of 512 KiB, cut to 64 bits: 31 MB
of sidecar for 1 TB of tokens. So a reader verifies the blocks that it reads, when it reads them, instead of the whole
file at the start. Version 1 has only the SHA-256 of the whole file.
"""

import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath, regular
from napkin.tokenizer.base import Tokenizer

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
    format: str = ""


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
        if msgspec.json.decode(data, type=_Format).format == "napkin-chat-tokens":
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


# Hashing releases the interpreter's lock, and several reads at a time suit a disk; few blocks are not worth a thread.
_THREADS = 4
_BLOCKS_PER_THREAD = 4


class BlockVerifier:
    """The blocks of one mapped token file, each of which is verified when it is first read.

    A batch of windows is copied only after all of its blocks are verified: no step trains on a damaged block. Threads
    may read at the same time; a block is verified once, until `verify_again`.
    """

    def __init__(self, path: Path, tokens: NDArray[np.integer], sidecar: Sidecar) -> None:
        self.path = path
        self.tokens = tokens
        self.vocab_size = sidecar.vocab_size
        self._digests = sidecar.block_digests
        self._bytes = tokens.view(np.uint8)
        self._verified = np.zeros(n_blocks(len(self._bytes)), bool)
        self._lock = threading.Lock()

    def verify(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Verify the blocks of the tokens `starts` to `stops`, several stretches of at least one token.

        Raises CorruptFile, naming file and block, if one was altered or has a token outside the vocabulary.
        """
        size = self.tokens.itemsize
        first, last = starts * size // BLOCK_BYTES, (stops * size - 1) // BLOCK_BYTES
        if len(first) and (last - first).max() > 1:
            stretches = [np.arange(one, other + 1) for one, other in zip(first, last, strict=True)]
            first = last = np.concatenate(stretches)
        if self._verified[first].all() and self._verified[last].all():
            return
        with self._lock:
            blocks = np.unique(np.concatenate([first, last]))
            self._verify(blocks[~self._verified[blocks]])

    def verify_again(self) -> None:
        """Verify all blocks that have been verified: the file on the disk has changed."""
        with self._lock:
            blocks = np.flatnonzero(self._verified)
            self._verified[:] = False
            self._verify(blocks)

    def is_intact(self, block: int) -> bool:
        """True if a block has its checksum."""
        expected = self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
        return block_digest(self._block(block).data) == expected

    def _verify(self, blocks: NDArray[np.int64]) -> None:
        if len(blocks) < 2 * _BLOCKS_PER_THREAD:
            list(map(self._verify_block, blocks.tolist()))
        else:
            with ThreadPoolExecutor(min(_THREADS, len(blocks) // _BLOCKS_PER_THREAD)) as pool:
                list(pool.map(self._verify_block, blocks.tolist()))

    def _verify_block(self, block: int) -> None:
        if not self.is_intact(block):
            raise CorruptFile(
                f"'{self.path}' was altered: {describe_block(block)} does not have the checksum in its sidecar: "
                "restore the file, or make the tokens again"
            )
        ids = self._block(block).view(self.tokens.dtype)
        if int(ids.max()) >= self.vocab_size:
            place = int((ids >= self.vocab_size).argmax())
            offset = block * BLOCK_BYTES + place * ids.itemsize
            raise CorruptFile(
                f"'{self.path}' holds token {int(ids[place])} at byte {offset:,} in block {block:,}, its vocabulary "
                f"ends at {self.vocab_size - 1}: make the tokens again"
            )
        self._verified[block] = True

    def _block(self, block: int) -> NDArray[np.uint8]:
        return self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]


def describe_block(block: int) -> str:
    """The block's number, and its place in the file, for a message."""
    return f"block {block:,} (from byte {block * BLOCK_BYTES:,})"


TokenArray = NDArray[np.uint16] | NDArray[np.uint32]

SEPARATOR = "<|endoftext|>"


class TokenFile:
    """A token file opened for reading, by `TokenFile.open`.

    `tokens` is the memory-mapped, read-only array of all ids, including separators; `text_bytes` is the number of UTF-8
    bytes of the documents' text, excluding separators. `windows` and `stretch` verify what they read, after
    `verify_on_read`; `tokens` itself does not.
    """

    def __init__(self, path: Path, tokens: TokenArray, sidecar: Sidecar) -> None:
        self.path = path
        self.tokens = tokens
        self.n_tokens = sidecar.tokens
        self.n_documents = sidecar.documents
        self.text_bytes = sidecar.text_bytes
        self.vocab_size = sidecar.vocab_size
        self.separator = sidecar.separator
        self.tokenizer_fingerprint = sidecar.tokenizer
        self.sha256 = sidecar.sha256
        self._blocks = BlockVerifier(path, tokens, sidecar) if sidecar.version > 1 else None
        self._verifies = False

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
        sidecar = read_sidecar(path)
        if tokenizer_fingerprint is not None and tokenizer_fingerprint != sidecar.tokenizer:
            raise NapkinError(
                f"'{path}' was made by another tokenizer: expects {sidecar.tokenizer}, got "
                f"{tokenizer_fingerprint}: use the one it expects or encode the text again under another name"
            )
        token_file = cls(path, _map_tokens(path, sidecar, in_memory), sidecar)
        if verify:
            token_file.verify()
        return token_file

    def verify_on_read(self) -> bool:
        """Verify each block of the file from now on when `windows` or `stretch` first reads it.

        False, without effect, if the sidecar is of version 1 and has no checksums of blocks.
        """
        self._verifies = self._blocks is not None
        return self._verifies

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.integer]:
        """Copies of `length` tokens from each of `starts`. A window that reaches the end continues at the beginning.
        The last token and the first are the same separator, which such a window contains once. `length` is at most
        `n_tokens`. Raises CorruptFile if blocks are verified and one was altered.
        """
        last_start = self.n_tokens - length
        over = np.flatnonzero(starts > last_start)
        if self._verifies and self._blocks is not None:
            ends = np.minimum(starts + length, self.n_tokens)
            begins = np.append(starts, np.ones(len(over), np.int64))
            self._blocks.verify(begins, np.append(ends, 1 + starts[over] - last_start))
        windows = sliding_window_view(self.tokens, length)[np.minimum(starts, last_start)]
        for row in over:
            head = self.tokens[starts[row] :]
            windows[row] = np.concatenate([head, self.tokens[1 : 1 + length - len(head)]])
        return windows

    def stretch(self, start: int, stop: int) -> TokenArray:
        """The mapped tokens `start` to `stop`; raises as `windows` does."""
        if self._verifies and self._blocks is not None and start < stop:
            self._blocks.verify(np.array([start]), np.array([stop]))
        return self.tokens[start:stop]

    def verify_again(self) -> None:
        """Verify the blocks that were verified when read, or else the whole file: it has changed on the disk."""
        if self._verifies and self._blocks is not None:
            self._blocks.verify_again()
        else:
            self.verify()

    def verify(self) -> None:
        """Read all tokens; raise CorruptFile unless checksums, range and number of separators are right."""
        checksum, n_separators, largest, altered = sha256(), 0, 0, ""
        block_tokens = BLOCK_BYTES // self.tokens.itemsize
        for block, start in enumerate(range(0, self.n_tokens, block_tokens)):
            chunk = self.tokens[start : start + block_tokens]
            checksum.update(chunk.data)
            n_separators += int(np.count_nonzero(chunk == self.separator))
            largest = max(largest, int(chunk.max()))
            if self._blocks is not None and not altered and not self._blocks.is_intact(block):
                altered = describe_block(block)
        if checksum.hexdigest() != self.sha256:
            where = f", {altered} is not what it was" if altered else ""
            raise CorruptFile(
                f"'{self.path}' was altered: its SHA-256 is {checksum.hexdigest()}, its sidecar says "
                f"{self.sha256}{where}: make the tokens again"
            )
        if altered:
            raise CorruptFile(
                f"the sidecar of '{self.path}' was altered: {altered} does not have the checksum in it, the whole file "
                "does: make the tokens again"
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

    def refuse_other_vocabulary(self, tokenizer: Tokenizer) -> None:
        """Raise CorruptFile if the sidecar names the tokenizer, but gives another vocabulary or separator than its."""
        separator = tokenizer.special_tokens.get(SEPARATOR)
        if (self.vocab_size, self.separator) != (tokenizer.vocab_size, separator):
            raise CorruptFile(
                f"the sidecar of '{self.path}' has a vocabulary of {self.vocab_size} and separator {self.separator}, "
                f"its tokenizer {tokenizer.vocab_size} and {separator}: make the tokens again"
            )


def _map_tokens(path: Path, sidecar: Sidecar, in_memory: bool) -> TokenArray:
    dtype, expected_bytes = np.dtype(NUMPY_DTYPES[sidecar.dtype]), sidecar.size_bytes
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
        raise cannot_be_read(path, error) from error
    return np.frombuffer(content, dtype)
