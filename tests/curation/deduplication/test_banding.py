"""Bands and rows of a threshold, and the curve that they plan."""

import numpy as np
import pytest
from scipy.integrate import quad

from napkin.curation.deduplication import Banding, MinHash, choose_banding
from napkin.errors import NapkinError


@pytest.mark.parametrize(("threshold", "hashes", "weight"), [(0.8, 128, 0.5), (0.5, 64, 0.5), (0.7, 100, 0.2)])
def test_no_other_bands_and_rows_have_less_error(threshold: float, hashes: int, weight: float) -> None:
    def error(banding: Banding) -> float:
        missed = quad(lambda s: 1 - float(banding.probability(s)), threshold, 1)[0]
        return weight * quad(banding.probability, 0, threshold)[0] + (1 - weight) * missed

    chosen = choose_banding(threshold, hashes, false_positive_weight=weight)
    assert chosen.bands * chosen.rows <= hashes
    some = [Banding(b, r) for r in range(1, 40) for b in {1, 2, hashes // r // 2, hashes // r} if 0 < b <= hashes // r]
    near = [Banding(chosen.bands + b, chosen.rows + r) for b in (-1, 0, 1) for r in (-1, 0, 1)]
    near = [each for each in near if min(each.bands, each.rows) > 0 and each.bands * each.rows <= hashes]
    assert error(chosen) <= min(map(error, some + near)) + 1e-4


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
    with pytest.raises(NapkinError, match="weight"):
        choose_banding(0.8, 128, false_positive_weight=2.0)
