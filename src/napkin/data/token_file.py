"""Token files: a corpus as token ids on disk, memory-mapped instead of read.

`NAME.tokens` contains the ids only, as little-endian uint16 if the vocabulary allows it, otherwise uint32;
`NAME.tokens.json`, its sidecar, describes them (see napkin.data.sidecar). Each document is preceded by the separator,
and one more is at the end. The sidecar gets its name last: tokens without one cannot be opened.

Verifies each block of a mapped token file when it is first read, instead of the whole file at the start.

A batch of windows is copied only after all of its blocks are verified: nothing is learned from a damaged block. Threads
may read at the same time; a block is verified once, until `verify_again`.
"""

import mmap
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from napkin.data.sidecar import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    NUMPY_DTYPES,
    Sidecar,
    block_digest,
    cannot_be_read,
    n_blocks,
    read_sidecar,
)
from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath, regular
from napkin.tokenizer.base import Tokenizer

# Hashing releases the interpreter's lock, and several reads at a time suit a disk; few blocks are not worth a thread.
_THREADS = 4
_BLOCKS_PER_THREAD = 4


class BlockVerifier:
    """The blocks of one token file, and which of them are verified."""

    bytes_read: int
    """Bytes that have been hashed."""

    def __init__(self, path: Path, tokens: NDArray[np.integer], sidecar: Sidecar) -> None:
        self.path = path
        self.tokens = tokens
        self.vocab_size = sidecar.vocab_size
        self.bytes_read = 0
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
            _exhaust(map(self._verify_block, blocks.tolist()))
        else:
            with ThreadPoolExecutor(min(_THREADS, len(blocks) // _BLOCKS_PER_THREAD)) as pool:
                _exhaust(pool.map(self._verify_block, blocks.tolist()))
        self.bytes_read += sum(len(self._block(block)) for block in blocks.tolist())

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


def _exhaust(done: Iterable[None]) -> None:
    for _ in done:
        pass


TokenArray = NDArray[np.uint16] | NDArray[np.uint32]

SEPARATOR = "<|endoftext|>"


class TokenFile:
    """A token file opened for reading, by `TokenFile.open`.

    `tokens` is the memory-mapped, read-only array of all ids, including separators; `text_bytes` is the number of UTF-8
    bytes of the documents' text, excluding separators. `windows` and `stretch` verify what they read, after
    `verify_on_read`; `tokens` itself does not.
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

    @property
    def bytes_verified(self) -> int:
        """Bytes that were read to verify blocks."""
        return 0 if self._blocks is None else self._blocks.bytes_read

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.integer]:
        """Copies of `length` tokens from each of `starts`. A window that reaches the end goes on at the beginning.

        The last token and the first are the same separator, which such a window has once. `length` is at most
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
