"""The keys by which documents are found to be duplicates: one of the whole text, or one per band of a signature."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from napkin.curation.deduplication.banding import Banding, choose_banding
from napkin.curation.deduplication.key_file import CHUNK, KeyChunk, KeyHeader
from napkin.curation.deduplication.minhash import BATCH_BYTES, MinHash

Identified = Iterable[tuple[str, str]]
"""Pairs of an identity and a text."""


@dataclass(frozen=True)
class ExactKeys:
    """One key of 128 bits (BLAKE2b) per text, of its words as they are: white space alone makes no difference."""

    @property
    def header(self) -> KeyHeader:
        """What the keys are."""
        return KeyHeader("BLAKE2b-128 of the text, white space as single spaces", tables=1, width=2)

    def chunks(self, documents: Identified) -> Iterator[KeyChunk]:
        """The keys of documents."""
        for batch in _batches(documents):
            digests = b"".join(text_digest(text) for _, text in batch)
            keys = np.frombuffer(digests, "<u8").reshape(1, len(batch), 2)
            yield KeyChunk([identity for identity, _ in batch], _lengths(batch), keys)


@dataclass(frozen=True)
class NearKeys:
    """One key of 64 bits per band of a MinHash signature. A text without words has none."""

    minhash: MinHash
    banding: Banding

    @classmethod
    def of(cls, threshold: float, hashes: int = 128, words: int = 5) -> "NearKeys":
        """The keys that find nine in ten pairs of that Jaccard similarity, and more above it; see `choose_banding`."""
        return cls(MinHash(hashes, words), choose_banding(threshold, hashes))

    @property
    def header(self) -> KeyHeader:
        """What the keys are."""
        minhash, banding = self.minhash, self.banding
        definition = (
            f"MinHash of {minhash.words}-word shingles, {minhash.hashes} hashes, "
            f"{banding.bands} bands of {banding.rows} rows"
        )
        return KeyHeader(definition, tables=banding.bands, width=1)

    def chunks(self, documents: Identified) -> Iterator[KeyChunk]:
        """The keys of documents."""
        for batch in _batches(documents):
            signatures, words = self.minhash.signatures(text for _, text in batch)
            keys = np.maximum(self.banding.keys(signatures), np.uint64(1))
            keys[:, words == 0] = 0
            yield KeyChunk([identity for identity, _ in batch], _lengths(batch), keys[:, :, None])


def text_digest(text: str) -> bytes:
    """16 bytes that two texts share if they are equal but for white space.

    >>> text_digest("a  b\\n") == text_digest("a b"), text_digest("a b") == text_digest("ab")
    (True, False)
    """
    return hashlib.blake2b(" ".join(text.split()).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _batches(documents: Identified) -> Iterator[list[tuple[str, str]]]:
    """Some megabytes of documents at a time, at most a chunk."""
    batch: list[tuple[str, str]] = []
    size = 0
    for identity, text in documents:
        batch.append((identity, text))
        size += len(text)
        if size >= BATCH_BYTES or len(batch) == CHUNK:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _lengths(batch: list[tuple[str, str]]) -> np.ndarray:
    return np.array([len(text) for _, text in batch], np.int64)
