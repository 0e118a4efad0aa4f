"""The blocks of a KV cache: who uses them, and which hold a prefix that another request may share.

A block holds the keys and values of `block_size` tokens that follow each other. A full block is known by the digest of
its tokens and of all before them, so equal prefixes find each other's blocks (Kwon et al. 2023, "Efficient Memory
Management for Large Language Model Serving with PagedAttention"). A block that nobody uses stays until its place is
needed, least recently used first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

Digest = bytes
FIRST: Digest = b""
"""What comes before the first block."""


class BlockPool:
    """A fixed number of blocks, each used by any number of sequences."""

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self.n_blocks, self.block_size = n_blocks, block_size
        self._users = [0] * n_blocks
        self._empty = list(range(n_blocks - 1, -1, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Blocks without users that hold a known prefix, least recently used first."""
        self._by_digest: dict[Digest, int] = {}
        self._digests: dict[int, Digest] = {}

    @property
    def n_free(self) -> int:
        """Blocks that can be taken: empty ones, and those that hold a prefix nobody uses now."""
        return len(self._empty) + len(self._unused)

    def take(self) -> int | None:
        """A block for new tokens; None if all are in use."""
        if self._empty:
            block = self._empty.pop()
        elif self._unused:
            block, _ = self._unused.popitem(last=False)
            del self._by_digest[self._digests.pop(block)]
        else:
            return None
        self._users[block] = 1
        return block

    def share(self, digest: Digest) -> int | None:
        """The block that holds a prefix, with one user more; None if there is none."""
        block = self._by_digest.get(digest)
        if block is not None:
            self._unused.pop(block, None)
            self._users[block] += 1
        return block

    def name(self, block: int, digest: Digest) -> None:
        """Say what a full block holds. A prefix that is known already keeps its block."""
        if digest not in self._by_digest and block not in self._digests:
            self._by_digest[digest] = block
            self._digests[block] = digest

    def release(self, block: int) -> None:
        """One user less."""
        self._users[block] -= 1
        if self._users[block] == 0:
            if block in self._digests:
                self._unused[block] = None
            else:
                self._empty.append(block)


def digest_of(before: Digest, tokens: Sequence[int]) -> Digest:
    """The name of a block: a digest of its tokens and, through `before`, of all before them."""
    return hashlib.blake2b(before + np.asarray(tokens, dtype=np.int64).tobytes(), digest_size=16).digest()
