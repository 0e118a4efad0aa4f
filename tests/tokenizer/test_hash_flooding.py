"""Keys that were chosen so that all collide, were the hash known, are spread like any others; no result changes."""

import numpy as np
import pytest
from numpy.typing import NDArray

from napkin.tokenizer.numba import fields, learn_merges, merge_pairs
from napkin.tokenizer.numba.apply_merges import NEVER
from napkin.tokenizer.numba.counting import PreTokenCounter
from napkin.tokenizer.numba.dispatch import CORE, FOR_TRAINING
from napkin.tokenizer.numba.encoding import Encoder, _Vocabulary
from napkin.tokenizer.numba.learn_merges import learn_merges_compiled

# The constants of a well-known unkeyed hash, (low ^ high * OTHER) * GOLDEN, folded; and all arithmetic modulo 2^64.
GOLDEN, OTHER, MASK = 0x9E3779B97F4A7C15, 0x9FB21C651E98DF25, 2**64 - 1
INVERSE = pow(GOLDEN, -1, 2**64)
N_WORDS = 20_000
# Of 20,000 keys at random in tables that are half full at most, hardly ever are more than a hundred neighbours.
FEW = 500


def short_words() -> list[bytes]:
    """Words of 8 bytes whose hash, folded, is a multiple of 2^17."""
    length = 8 << 56
    return [((i << 49) * INVERSE & MASK ^ length * OTHER & MASK).to_bytes(8, "little") for i in range(N_WORDS)]


def long_words() -> list[bytes]:
    """Words of 16 bytes, in two steps of low = (low ^ word) * GOLDEN, low ^= low >> 29, the second of equal result."""
    words: list[bytes] = []
    for i in range(N_WORDS):
        low = (16 ^ i) * GOLDEN & MASK
        words.append(i.to_bytes(8, "little") + (low ^ low >> 29).to_bytes(8, "little"))
    return words


def longest_run(taken: NDArray[np.bool_]) -> int:
    """The longest run of full slots: no search takes more probes."""
    ends = np.flatnonzero(~np.concatenate([[False], taken, [False]]))
    return int(np.diff(ends).max()) - 1


@pytest.mark.thorough
@pytest.mark.parametrize("words", [short_words(), long_words()], ids=["short", "long"])
def test_words_made_to_collide_do_not(words: list[bytes]) -> None:
    ends = np.cumsum([len(word) for word in words]).tolist()
    encoder = Encoder([], "whole")
    ids, _ = encoder.encode(b"".join(words), ends)
    assert ids.astype(np.uint8).tobytes() == b"".join(words)
    table = encoder._idle[0].array(fields.TABLE)
    assert (table[:, 1] != 0).sum() == N_WORDS
    assert longest_run(table[:, 1] != 0) < FEW

    counter = PreTokenCounter("whole", 1)
    counter.add(b"".join(words), ends)
    counter.finish()
    assert longest_run(counter._tables[0].array(fields.TABLE)[:, 1] != 0) < FEW


def test_merges_made_to_collide_do_not() -> None:
    # The first 20,000 of a million pairs, by the upper bits of their product with GOLDEN.
    random = np.random.default_rng(0)
    pairs = random.integers(256, 2**20, (1_000_000, 2), np.int64)
    products = (pairs[:, 0] << 20 | pairs[:, 1]).astype(np.uint64) * np.uint64(GOLDEN)
    vocabulary = _Vocabulary([tuple(pair) for pair in pairs[np.argsort(products)[:N_WORDS]].tolist()])
    assert (vocabulary.byte_pairs == NEVER).all()
    assert np.count_nonzero(vocabulary.pairs) == N_WORDS
    assert longest_run(vocabulary.pairs[:, 7] != 0) < 50


def test_pairs_made_to_collide_while_merges_are_learned_do_not() -> None:
    CORE.load(*FOR_TRAINING)
    random = np.random.default_rng(0)
    pairs = random.integers(0, 2**20, (2_000_000, 2), np.int64)
    products = (pairs[:, 0] << 32 | pairs[:, 1]).astype(np.uint64) * np.uint64(GOLDEN)
    slots = (products ^ products >> np.uint64(32)) & np.uint64(2**18 - 1)
    chosen = pairs[np.argsort(slots)[:N_WORDS]].astype(np.uint32)
    symbols, starts = chosen.reshape(-1), np.arange(0, 2 * N_WORDS + 1, 2, dtype=np.uint32)
    learner = learn_merges._Learner(symbols, starts, np.ones(N_WORDS, np.int64), 2**20, None)
    table = learner._arrays[merge_pairs.PAIR_SLOTS]
    assert (table != merge_pairs.NONE).sum() == len(np.unique(chosen, axis=0))
    assert longest_run(table != merge_pairs.NONE) < FEW


def test_long_words_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # With this multiplier the hash of all is 0.
    monkeypatch.setattr(fields, "MULTIPLIER", 0)
    words = [bytes([65 + i]) * 16 for i in range(20)] * 3
    ends = np.cumsum([len(word) for word in words]).tolist()
    ids, _ = Encoder([], "whole").encode(b"".join(words), ends)
    assert ids.astype(np.uint8).tobytes() == b"".join(words)
    counter = PreTokenCounter("whole", 1)
    counter.add(b"".join(words), ends)
    counter.finish()
    symbols, starts, counts = counter.words()
    assert sorted(symbols[start : start + 16].astype(np.uint8).tobytes() for start in starts[:-1]) == words[:20]
    assert counts.tolist() == [3] * 20


def test_neither_ids_nor_merges_depend_on_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ("the cat isn't in THE hat. 你好 1234, " + "a longer-than-usual-pre-token" * 3 + "\n\n  é ") * 50
    results: list[tuple[list[int], list[tuple[int, int]]]] = []
    for key, multiplier in [(fields.KEY, fields.MULTIPLIER), (0, GOLDEN), (MASK, 1), (1, MASK)]:
        monkeypatch.setattr(fields, "KEY", key)
        monkeypatch.setattr(fields, "MULTIPLIER", multiplier)
        counter = PreTokenCounter("gpt2", 1)
        counter.add(text.encode(), [len(text.encode())])
        counter.finish()
        merges = learn_merges_compiled(counter.words(), 60)
        results.append((Encoder(merges, "gpt2").encode(text.encode())[0].tolist(), merges))
    assert all(result == results[0] for result in results)
    assert len(results[0][1]) > 40
