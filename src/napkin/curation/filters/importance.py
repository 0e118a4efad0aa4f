"""The stage `importance-resampling`: a sample of documents that is distributed like a target: DSIR (Xie et al. 2023).

A text is the counts z of its n-grams of tokens, hashed into m columns. With p the shares of the columns among all
n-grams of the target and q those of the corpus itself, both with one count more in each column, a document's weight is

    log w = Σ_j z_j · log(p_j / q_j)

and the k documents with the largest log w + g are a sample of k without replacement by these weights, where g is
Gumbel's noise, -log(-log u) (Gumbel top-k; Vieira 2014). u comes from a hash of the seed and the document's identity: a
sample does not depend on shards or processes.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from napkin.curation.filters.classifier import check_fractions, share_threshold
from napkin.curation.stage import Dropped, Record
from napkin.errors import NapkinError
from napkin.files import refuse_irregular

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CHUNK = 4096


@dataclass(frozen=True)
class ImportanceResampling:
    """Keep a random share of the documents, those that are like a target with the larger probability (DSIR).

    The longer a document, the farther its weight is from 1: cut documents of very different lengths first.
    """

    name: ClassVar[str] = "importance-resampling"
    reads: ClassVar[tuple[str, ...]] = ("target",)

    target: str
    """A file of texts of the kind that is wanted: JSON lines, Parquet, or text."""
    share: float
    """Fraction of documents to keep; above 0."""
    columns: int = 16_384
    """Columns that n-grams are hashed into, a power of 2."""
    max_n: int = 2
    """Most tokens of an n-gram: 1 is words alone."""
    seed: int = 0
    """Another seed gives another sample."""
    field: str = "importance"
    """The field of documents that gets log w."""

    def __post_init__(self) -> None:
        check_fractions(self, "share")
        if self.share == 0:
            raise NapkinError("share is 0: nothing would be kept")
        if not 2 <= self.columns <= 2**24 or self.columns & (self.columns - 1):
            raise NapkinError(f"columns is {self.columns}: use a power of 2 up to {2**24}")
        if not 1 <= self.max_n <= 5:
            raise NapkinError(f"max_n is {self.max_n}: use 1 to 5")
        if not self.field:
            raise NapkinError("field is empty: name the field that gets the logarithm of the weight")

    def summarize(self, records: Iterable[Record], summary: Path) -> None:
        import numpy as np

        following = iter(records)
        with summary.open("xb") as file:
            while chunk := list(islice(following, _CHUNK)):
                counts = [self._counts(record.text) for record in chunk]
                ends = np.cumsum([0, *(len(columns) for columns, _ in counts)])
                uniform = np.array([_uniform(self.seed, record.identity) for record in chunk])
                for array in (np.array([len(chunk), ends[-1]], np.int64), ends.astype(np.int64), uniform):
                    file.write(array.tobytes())
                for which in (0, 1):
                    file.write(np.concatenate([each[which] for each in counts]).astype(np.int32).tobytes())

    def decide(self, summaries: Sequence[Path], decisions: Sequence[Path], scratch: Path, memory: int) -> None:
        import numpy as np

        del memory
        wanted, corpus, total = np.zeros(self.columns), np.zeros(self.columns), 0
        for text in _target_texts(self.target):
            columns, counts = self._counts(text)
            wanted[columns] += counts
        if not wanted.any():
            raise NapkinError(f"the target '{self.target}' has no words: name a file of texts that are wanted")
        for summary in summaries:
            for chunk in _chunks(summary):
                corpus += np.bincount(chunk.columns, chunk.counts, self.columns)
                total += len(chunk.uniform)
        ratios = np.log((wanted + 1) / (wanted.sum() + self.columns) / ((corpus + 1) / (corpus.sum() + self.columns)))
        keys: list[Path] = []
        for number, summary in enumerate(summaries):
            keys.append(scratch / f"{number}.keys")
            with keys[-1].open("xb") as file, decisions[number].open("xb") as decision:
                decision.write(bytes(8))
                for chunk in _chunks(summary):
                    n = len(chunk.uniform)
                    rows = np.repeat(np.arange(n), np.diff(chunk.ends))
                    weights = np.bincount(rows, chunk.counts * ratios[chunk.columns], n)
                    drawn = weights - np.log(-np.log(chunk.uniform))
                    file.write(drawn.tobytes())
                    decision.write(np.stack([drawn, weights], axis=1).tobytes())
        threshold = np.array([share_threshold(keys, self.share, total)])
        for decision in decisions:
            with decision.open("r+b") as file:
                file.write(threshold.tobytes())

    def apply(self, records: Iterable[Record], decisions: Path) -> Iterator[Record | Dropped]:
        import numpy as np

        with decisions.open("rb") as file:
            (threshold,) = np.frombuffer(file.read(8), np.float64).tolist()
            for record in records:
                drawn, weight = np.frombuffer(file.read(16), np.float64).tolist()
                if drawn < threshold:
                    yield Dropped("not drawn", f"log weight {weight:.6g}")
                else:
                    record.fields[self.field] = round(weight, 6)
                    yield record

    def _counts(self, text: str) -> "tuple[NDArray[np.int64], NDArray[np.int64]]":
        """The columns of a text's n-grams, and how many are in each."""
        import numpy as np

        from napkin.curation.filters.quality_model import hashed_ngrams

        return np.unique(hashed_ngrams(text, self.columns, self.max_n), return_counts=True)


class _Chunk(NamedTuple):
    """Some documents: where each one's columns begin and end, its uniform number, and columns with counts."""

    ends: "NDArray[np.int64]"
    uniform: "NDArray[np.float64]"
    columns: "NDArray[np.int32]"
    counts: "NDArray[np.int32]"


def _chunks(summary: Path) -> Iterator[_Chunk]:
    import numpy as np

    with summary.open("rb") as file:
        while sizes := file.read(16):
            n, total = np.frombuffer(sizes, np.int64).tolist()
            ends = np.frombuffer(file.read(8 * (n + 1)), np.int64)
            uniform = np.frombuffer(file.read(8 * n), np.float64)
            columns, counts = (np.frombuffer(file.read(4 * total), np.int32) for _ in range(2))
            yield _Chunk(ends, uniform, columns, counts)


def _uniform(seed: int, identity: str) -> float:
    """A number between 0 and 1, neither of them, that a seed and an identity always have."""
    digest = hashlib.blake2b(f"{seed} {identity}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> 12) + 0.5) / 2**52


def _target_texts(path: str) -> Iterator[str]:
    from napkin.curation.reading.bounded_stream import ReadLimits, SetAside
    from napkin.curation.reading.documents import read_file
    from napkin.curation.reading.input_file import find_files

    try:
        refuse_irregular(path)
    except OSError as error:
        raise NapkinError(f"the target '{path}' cannot be read: {error.strerror}") from None
    for file in find_files([path]):
        for record in [file] if isinstance(file, SetAside) else read_file(file, ReadLimits()):
            if isinstance(record, Record):
                yield record.text
