"""Bands and rows of a threshold, and the curve that they plan."""

import random

import numpy as np
import pytest

from napkin.curation.deduplication import Banding, MinHash, choose_banding
from napkin.curation.deduplication.document_decisions import NearKeys
from napkin.errors import NapkinError


@pytest.mark.parametrize("least_found", [0.0, 0.9])
@pytest.mark.parametrize(("threshold", "hashes", "weight"), [(0.8, 128, 0.5), (0.5, 64, 0.5), (0.7, 100, 0.2)])
def test_no_other_bands_and_rows_have_less_error(
    threshold: float, hashes: int, weight: float, least_found: float
) -> None:
    from scipy.integrate import quad

    def error(banding: Banding) -> float:
        missed = quad(lambda s: 1 - float(banding.probability(s)), threshold, 1)[0]
        return weight * quad(banding.probability, 0, threshold)[0] + (1 - weight) * missed

    chosen = choose_banding(threshold, hashes, least_found=least_found, false_positive_weight=weight)
    assert float(chosen.probability(threshold)) >= least_found
    assert chosen.bands * chosen.rows <= hashes
    some = [Banding(b, r) for r in range(1, 40) for b in {1, 2, hashes // r // 2, hashes // r} if 0 < b <= hashes // r]
    near = [Banding(chosen.bands + b, chosen.rows + r) for b in (-1, 0, 1) for r in (-1, 0, 1)]
    near = [each for each in near if min(each.bands, each.rows) > 0 and each.bands * each.rows <= hashes]
    enough = [each for each in some + near if float(each.probability(threshold)) >= least_found]
    assert error(chosen) <= min(map(error, enough)) + 1e-4


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("hashes", [16, 64, 112, 128, 256])
@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
def test_nine_in_ten_pairs_at_the_threshold_are_found(threshold: float, hashes: int) -> None:
    assert float(choose_banding(threshold, hashes).probability(threshold)) >= 0.9


def test_where_no_bands_find_enough_those_that_find_the_most_are_taken() -> None:
    assert choose_banding(0.1, 8) == Banding(8, 1)


@pytest.mark.thorough
def test_planted_pairs_at_the_threshold_are_found() -> None:
    """Of 400 pairs of similarity 0.8, 0.908 are expected with a standard error of 0.015."""
    draw = random.Random(5)
    first, second = [], []
    for _ in range(400):
        words = [f"w{draw.getrandbits(60):x}" for _ in range(240)]
        first.append(" ".join(words[:216]))
        second.append(" ".join(words[:192] + words[216:]))
    keys = NearKeys.of(0.8, words=1)
    found = [keys.banding.keys(keys.minhash.signatures(texts)[0]) for texts in (first, second)]
    assert (found[0] == found[1]).any(axis=0).mean() > 0.85


@pytest.mark.parametrize(("bands", "rows"), [(16, 8), (9, 13), (128, 1), (1, 128), (3, 5)])
def test_a_band_is_its_own_part_of_a_signature(bands: int, rows: int) -> None:
    draw = np.random.default_rng(bands)
    first, second = draw.integers(0, 2**32, (2, bands, 128), dtype=np.uint32)
    for band in range(bands):
        part = slice(band * rows, (band + 1) * rows)
        second[band, part] = first[band, part]
        # All but one number of the next band.
        rest = slice((band + 1) * rows, min((band + 2) * rows, bands * rows) - 1)
        second[band, rest] = first[band, rest]
    banding = Banding(bands, rows)
    assert (banding.keys(first) == banding.keys(second)).tolist() == np.eye(bands, dtype=bool).tolist()


@pytest.mark.torture
def test_pairs_share_a_band_as_often_as_the_curve_says() -> None:
    banding, pairs, size = Banding(9, 13), 500, 800
    draw = np.random.default_rng(0)
    for truth in (0.7, 0.8, 0.9):
        shared = round(2 * size * truth / (1 + truth))
        first, second = [], []
        for _ in range(pairs):
            words = [f"w{number:x}" for number in draw.integers(0, 2**62, 2 * size - shared).tolist()]
            first.append(" ".join(words[:size]))
            second.append(" ".join(words[:shared] + words[size:]))
        minhash = MinHash(words=1)
        keys = [banding.keys(minhash.signatures(texts)[0]) for texts in (first, second)]
        found = (keys[0] == keys[1]).any(axis=0).mean()
        planned = float(banding.probability(truth))
        assert abs(found - planned) < 4 * np.sqrt(planned * (1 - planned) / pairs)


def test_thresholds_and_weights_out_of_range_are_refused() -> None:
    for threshold in (0.0, 1.0):
        with pytest.raises(NapkinError, match="threshold"):
            choose_banding(threshold, 128)
    with pytest.raises(NapkinError, match="least probability"):
        choose_banding(0.8, 128, least_found=1.0)
    with pytest.raises(NapkinError, match="weight"):
        choose_banding(0.8, 128, false_positive_weight=2.0)
