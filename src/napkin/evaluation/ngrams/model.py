"""The model of bytes by interpolated modified Kneser-Ney, trained by sorting, scored by links; `plain.py` defines it.

    model = train_ngrams(texts, order=6)
    model.bits_per_byte(other_texts)

Texts are counted in parts: the n-grams of a part are packed into 64 bits each, sorted and counted, and parts of like
size are merged. Memory is that of the different n-grams, `training_bytes` at most. Lower orders follow from the highest
one, a pass over sorted keys for each.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from napkin.errors import CorruptFile, NapkinError, first_line
from napkin.evaluation.ngrams.compiled import CORE
from napkin.evaluation.ngrams.plain import MARK, MOST_ORDER, discounts_of
from napkin.files import StrPath, atomic_write_bytes, read_bytes

PART_BYTES = 2**24
"""Bytes of text that are sorted at a time."""
FORMAT = "napkin-ngrams"
_NONE = 0xFFFFFFFF
_KINDS = {"firsts": np.int64, "symbols": np.uint8, "seen": np.float64, "gammas": np.float64, "following": np.uint32}

Grams = tuple[NDArray[np.uint64], NDArray[np.uint32]]
"""Keys in order, and their counts."""


@dataclass(frozen=True)
class Level:
    """The grams of an order, by their contexts."""

    firsts: NDArray[np.int64]
    """The number of the first gram of each context, and the number of all grams at the end."""
    symbols: NDArray[np.uint8]
    """The last symbol of each gram, in order within a context."""
    seen: NDArray[np.float64]
    """The probability of each gram, without that of the lower order."""
    gammas: NDArray[np.float64]
    """The weight of the lower order in each context."""
    following: NDArray[np.uint32]
    """The context of the next order that each gram is."""


class NgramModel:
    """Probabilities of the bytes of documents, each after at most `order - 1` bytes before it."""

    def __init__(self, order: int, begin: int, levels: Sequence[Level]) -> None:
        self.order, self._begin, self._levels = order, begin, tuple(levels)
        rows = [[0] * len(_KINDS)]
        rows += [[getattr(level, name).ctypes.data for name in _KINDS] for level in self._levels]
        self._tables = np.array(rows, dtype=np.int64)

    @property
    def n_grams(self) -> list[int]:
        """The number of different grams of each order, from 1."""
        return [len(level.symbols) for level in self._levels]

    @property
    def n_bytes(self) -> int:
        """Memory of the model."""
        return sum(getattr(level, name).nbytes for level in self._levels for name in _KINDS)

    def bits(self, documents: Iterable[str | bytes]) -> NDArray[np.float64]:
        """The bits of each document, which are those of its bytes and not of its end; 0 of an empty one."""
        from napkin.evaluation.ngrams.compiled.scoring import score

        CORE.load("counting", "scoring")
        found = []
        for part in _parts(documents, keep_empty=True):
            text = np.frombuffer(part, dtype=np.uint8)
            bits = np.zeros(part.count(MARK), dtype=np.float64)
            states = np.zeros(self.order + 2, dtype=np.int64)
            n = score(
                self._tables.ctypes.data,
                self.order,
                self._begin,
                text.ctypes.data,
                len(text),
                bits.ctypes.data,
                states.ctypes.data,
            )
            found.append(bits[:n])
        return np.concatenate(found) if found else np.zeros(0)

    def bits_per_byte(self, documents: Iterable[str | bytes]) -> float:
        """Bits of all documents over their bytes. Raises NapkinError where there is no text."""
        sizes: list[int] = []

        def counted() -> Iterator[bytes]:
            for each in documents:
                data = each.encode() if isinstance(each, str) else each
                sizes.append(len(data))
                yield data

        bits = self.bits(counted())
        if not sum(sizes):
            raise NapkinError("there is no text to score: give at least one byte")
        return float(bits.sum()) / sum(sizes)

    def save(self, path: StrPath, *, overwrite: bool = False) -> None:
        """Write it as a safetensors file."""
        from safetensors.numpy import save

        tensors = {f"{k}.{name}": getattr(level, name) for k, level in enumerate(self._levels, 1) for name in _KINDS}
        about = json.dumps({"format": FORMAT, "order": self.order, "begin": self._begin})
        atomic_write_bytes(path, save(tensors, {"about": about}), overwrite=overwrite)

    @staticmethod
    def load(path: StrPath) -> "NgramModel":
        """Read what `save` has written. Raises CorruptFile for anything else: the compiled core trusts the tables."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            data = read_bytes(path)
        except OSError as error:
            raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name an n-gram model") from None
        try:
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            about = json.loads(header["__metadata__"]["about"])
            order, begin = about["order"], about["begin"]
            if about["format"] != FORMAT or not isinstance(order, int) or not 2 <= order <= MOST_ORDER:
                raise ValueError("it is not an n-gram model of this version")
            tensors = load(data)
            levels = [Level(**{name: tensors[f"{k}.{name}"] for name in _KINDS}) for k in range(1, order + 1)]
            _refuse_wrong(levels, begin)
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptFile(f"'{path}' is not an n-gram model ({first_line(error)}): train it again") from None
        return NgramModel(order, begin, levels)


def _refuse_wrong(levels: Sequence[Level], begin: Any) -> None:
    for level, after in zip(levels, [*levels[1:], None], strict=True):
        for name, kind in _KINDS.items():
            array = getattr(level, name)
            if array.dtype != kind or array.ndim != 1 or not array.flags.c_contiguous:
                raise ValueError(f"{name} is not a list of {np.dtype(kind)}")
        n, n_contexts = len(level.symbols), len(level.gammas)
        fits = len(level.seen) == len(level.following) == n and len(level.firsts) == n_contexts + 1
        if not fits or level.firsts[0] != 0 or level.firsts[-1] != n or (np.diff(level.firsts) < 1).any():
            raise ValueError("its lists have lengths that do not belong together")
        n_after = 0 if after is None else len(after.gammas)
        if (level.following[level.following != _NONE] >= n_after).any():
            raise ValueError("a gram names a context that there is not")
        values = np.concatenate((level.seen, level.gammas))
        if not np.isfinite(values).all() or values.min() < 0 or values.max() > 1 or not level.gammas.all():
            raise ValueError("a probability is not one")
    if len(levels[0].gammas) != 1 or not isinstance(begin, int) or not 0 <= begin < len(levels[1].gammas):
        raise ValueError("it has no beginning")


def training_bytes(n_bytes: int, order: int) -> int:
    """The most memory that training on so many bytes takes, where every gram is another one."""
    grams = [min(n_bytes, 256**k) for k in range(1, order + 1)]
    # Tables of all orders; keys and counts of two of them, while they are merged; a part's text and keys.
    return sum(grams) * 37 + 2 * 24 * grams[-1] + 9 * PART_BYTES


def train_ngrams(
    documents: Iterable[str | bytes],
    order: int = 6,
    *,
    part_bytes: int = PART_BYTES,
    progress: Callable[[int], None] = lambda n_bytes: None,
) -> NgramModel:
    """Train on documents; `progress` is told the bytes that have been counted.

    Raises NapkinError for an order below 2 or above 8, for documents without text, and for one with a byte of 255,
    which text has not.
    """
    if not 2 <= order <= MOST_ORDER:
        raise NapkinError(f"the order of an n-gram model is {order}: use 2 to {MOST_ORDER}")
    CORE.load("counting", "scoring")
    runs: list[Grams] = []
    begins: list[list[Grams]] = [[] for _ in range(order)]
    done = 0
    for part in _parts(documents, part_bytes=part_bytes):
        _push(runs, _counted(part, order, begins))
        done += len(part)
        progress(done)
    if not runs:
        raise NapkinError("there is no text to train an n-gram model on: give at least one byte")
    while len(runs) > 1:
        runs.append(_merged(runs.pop(), runs.pop()))
    grams = runs.pop()
    levels, contexts = list[Level](), np.zeros(0, dtype=np.uint64)
    begin = 0
    for k in range(order, 0, -1):
        level, found = _level(grams, k, contexts)
        levels.append(level)
        if k == 2:
            begin = int(np.searchsorted(found, MARK))
        contexts = found
        if k > 1:
            grams = _shortened(grams, begins[k - 1])
    return NgramModel(order, begin, levels[::-1])


def _parts(
    documents: Iterable[str | bytes], *, part_bytes: int = PART_BYTES, keep_empty: bool = False
) -> Iterator[bytearray]:
    """Whole documents together, a mark before and after each."""
    part = bytearray([MARK])
    for each in documents:
        data = each.encode("utf-8", "surrogatepass") if isinstance(each, str) else each
        if MARK in data:
            raise NapkinError(f"a document has the byte {MARK} at {data.index(MARK)}, which text has not: decode it")
        if data or keep_empty:
            part += data
            part.append(MARK)
        if len(part) >= part_bytes:
            yield part
            part = bytearray([MARK])
    if len(part) > 1:
        yield part


def _counted(part: bytearray, order: int, begins: list[list[Grams]]) -> Grams:
    from napkin.evaluation.ngrams.compiled.counting import count_equal, pack_grams

    text, room = np.frombuffer(part, dtype=np.uint8), part.count(MARK)
    keys = np.empty(len(text), dtype=np.uint64)
    first, n_first = np.empty((order, room), dtype=np.uint64), np.zeros(order, dtype=np.int64)
    n = pack_grams(text.ctypes.data, len(text), order, keys.ctypes.data, first.ctypes.data, room, n_first.ctypes.data)
    for k in range(2, order):
        unique, counts = np.unique(first[k, : n_first[k]], return_counts=True)
        _push(begins[k], (unique, counts.astype(np.uint32)))
    keys = keys[:n]
    keys.sort()
    counts = np.empty(n, dtype=np.uint32)
    kept = count_equal(keys.ctypes.data, counts.ctypes.data, n)
    return keys[:kept].copy(), counts[:kept].copy()


def _push(runs: list[Grams], grams: Grams) -> None:
    """Add a run, and merge runs of like size: each gram is moved a logarithmic number of times."""
    runs.append(grams)
    while len(runs) > 1 and len(runs[-2][0]) <= 2 * len(runs[-1][0]):
        runs.append(_merged(runs.pop(), runs.pop()))


def _merged(first: Grams, second: Grams) -> Grams:
    from napkin.evaluation.ngrams.compiled.counting import merge

    room = len(first[0]) + len(second[0])
    keys, counts = np.empty(room, dtype=np.uint64), np.empty(room, dtype=np.uint32)
    sides = [number for grams in (first, second) for number in (*_addresses(*grams), len(grams[0]))]
    kept = merge(*sides, *_addresses(keys, counts))
    return (keys[:kept].copy(), counts[:kept].copy()) if kept < room else (keys, counts)


def _shortened(grams: Grams, begins: list[Grams]) -> Grams:
    from napkin.evaluation.ngrams.compiled.counting import shorten

    n = len(grams[0])
    keys, counts, buffer = np.empty(n, dtype=np.uint64), np.empty(n, dtype=np.uint32), np.zeros(256, dtype=np.int64)
    kept = shorten(grams[0].ctypes.data, n, *_addresses(keys, counts, buffer))
    found = keys[:kept].copy(), counts[:kept].copy()
    for each in begins:
        found = _merged(found, each)
    return found


def _level(grams: Grams, order: int, contexts_after: NDArray[np.uint64]) -> tuple[Level, NDArray[np.uint64]]:
    """The table of an order and the keys of its contexts; those of the next order are what its grams lead to."""
    from napkin.evaluation.ngrams.compiled.counting import link, weigh

    keys, counts = grams
    n = len(keys)
    of_counts = np.bincount(np.minimum(counts, 5), minlength=6)
    discounts = np.array(discounts_of([int(each) for each in of_counts[1:5]]), dtype=np.float64)
    contexts, gammas = np.empty(n, dtype=np.uint64), np.empty(n, dtype=np.float64)
    firsts, symbols = np.empty(n + 1, dtype=np.int64), np.empty(n, dtype=np.uint8)
    seen, following = np.empty(n, dtype=np.float64), np.empty(n, dtype=np.uint32)
    n_contexts = weigh(*_addresses(keys, counts), n, *_addresses(discounts, contexts, firsts, symbols, seen, gammas))
    buffer = np.zeros(256, dtype=np.int64)
    link(keys.ctypes.data, n, order, contexts_after.ctypes.data, len(contexts_after), *_addresses(following, buffer))
    level = Level(firsts[: n_contexts + 1].copy(), symbols, seen, gammas[:n_contexts].copy(), following)
    return level, contexts[:n_contexts].copy()


def _addresses(*arrays: NDArray[Any]) -> list[int]:
    return [array.ctypes.data for array in arrays]
