"""A Bloom filter forgets nothing, and takes as few new texts for old ones as it says."""

import math
import random
from pathlib import Path

import numpy as np
import pytest

from curation.deduplication.test_document_stages import decided, dropped
from napkin.curation import Record
from napkin.curation.deduplication import BloomFilter
from napkin.curation.deduplication.stages import BloomDuplicates, Duplicates
from napkin.errors import NapkinError


def plain_add(bits: set[int], key: tuple[int, int], n_bits: int, hashes: int) -> bool:
    """The definition, with a set of places."""
    step = key[1] % n_bits or 1
    places = {(key[0] % n_bits + number * step) % n_bits for number in range(hashes)}
    seen = places <= bits
    bits |= places
    return seen


@pytest.mark.parametrize("false_positives", [0.5, 0.1, 1e-3])
def test_it_is_its_definition_one_key_after_the_other_however_keys_are_divided(false_positives: float) -> None:
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 2**64, (600, 2), dtype=np.uint64)
    keys = keys[generator.integers(0, 600, 1500)]
    keys[7], keys[11, 1] = 0, 0
    # More keys than there is room for, so that false positives are many.
    found = []
    for size in (1, 37, 1500):
        seen = BloomFilter(300, false_positives=false_positives)
        found.append(np.concatenate([seen.add(keys[at : at + size]) for at in range(0, 1500, size)]))
    bits: set[int] = set()
    expected = [plain_add(bits, (int(a), int(b)), seen.bits, seen.hashes) for a, b in keys]
    for each in found:
        assert each.tolist() == expected
    assert seen.filled == len(bits) / seen.bits


@pytest.mark.parametrize("false_positives", [0.03, 1e-3])
def test_nothing_is_forgotten_and_the_share_of_false_positives_is_the_one_stated(false_positives: float) -> None:
    generator = np.random.default_rng(1)
    known = generator.integers(0, 2**64, (50_000, 2), dtype=np.uint64)
    seen = BloomFilter(50_000, false_positives=false_positives)
    assert seen.bytes <= 50_000 * 1.4428 * math.log2(1 / false_positives) / 8 + 1
    for at in range(0, 50_000, 1000):
        seen.add(known[at : at + 1000])
    assert seen.filled**seen.hashes == pytest.approx(false_positives, rel=0.05)
    size = seen.bytes
    copy = seen._bits.copy()  # pyright: ignore[reportPrivateUsage]
    assert seen.add(known[::7]).all()
    assert np.array_equal(seen._bits, copy)  # pyright: ignore[reportPrivateUsage]
    # New keys one at a time, and forgotten again: the share at exactly this filling.
    others = generator.integers(0, 2**64, (60_000, 2), dtype=np.uint64)
    hits = 0
    for at in range(0, 60_000, 500):
        piece = others[at : at + 500]
        first = seen.add(piece)
        seen._bits[:] = copy  # pyright: ignore[reportPrivateUsage]
        hits += int(first.sum())
    expected = 60_000 * false_positives
    assert abs(hits - expected) < 5 * math.sqrt(expected) + 0.1 * expected
    assert seen.bytes == size


def test_the_stage_drops_what_the_exact_one_drops_and_few_others(tmp_path: Path) -> None:
    draw = random.Random(3)
    texts = [" ".join(draw.choices("abcdefgh", k=draw.randrange(1, 6))) for _ in range(3000)]
    texts[5] = texts[4] + " \n"
    records = [Record(f"in#{number}", text) for number, text in enumerate(texts)]
    shards = [records[:1000], records[1000:1001], records[1001:]]
    exact = dropped(decided(Duplicates(keep="first"), shards, tmp_path / "exact"))
    sharp = dropped(decided(BloomDuplicates(documents=3000, false_positives=1e-12), shards, tmp_path / "sharp"))
    assert sharp.keys() == exact.keys()
    assert 0 < len(exact) < 2990
    # With many false positives, too, each text that is dropped by mistake is one of the new ones.
    vague = dropped(decided(BloomDuplicates(documents=3000, false_positives=0.2), shards, tmp_path / "vague"))
    assert vague.keys() > exact.keys()
    assert len(vague) - len(exact) < 0.2 * (3000 - len(exact))


def test_too_little_memory_and_too_many_documents_are_refused(tmp_path: Path) -> None:
    shards = [[Record(f"in#{number}", f"text {number}") for number in range(20)]]
    with pytest.raises(NapkinError, match=r"the corpus has 20 documents.*use documents 20"):
        decided(BloomDuplicates(documents=19), shards, tmp_path / "few")
    with pytest.raises(NapkinError, match=r"takes 35\.9 MB: use memory_bytes of \d+ or more"):
        decided(BloomDuplicates(), shards, tmp_path / "little", memory=2**25)
    for options in ({"documents": 0}, {"false_positives": 0.0}, {"false_positives": 0.9}, {"documents": 10**13}):
        with pytest.raises(NapkinError):
            BloomDuplicates(**options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(NapkinError):
        BloomFilter(10**13)
