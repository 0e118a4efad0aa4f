"""Verifies each block of a mapped token file when it is first read, instead of the whole file at the start.

A batch of windows is copied only after all of its blocks are verified: nothing is learned from a damaged block. Threads
may read at the same time; a block is verified once, until `verify_again`.
"""

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from napkin.data.sidecar import BLOCK_BYTES, DIGEST_BYTES, Sidecar, block_digest, n_blocks
from napkin.errors import CorruptFile

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
        """Whether a block has its checksum."""
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
    """Which block it is, and where in the file."""
    return f"block {block:,} (from byte {block * BLOCK_BYTES:,})"


def _exhaust(done: Iterable[None]) -> None:
    for _ in done:
        pass
