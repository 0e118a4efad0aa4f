"""Locality-sensitive hashing: which bands of a signature two documents must share to be candidates.

Of b bands of r numbers each, two documents of similarity s share at least one with probability 1 - (1 - s^r)^b, an
S-shaped curve (Indyk and Motwani 1998; Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from napkin.curation.deduplication.compiled.loading import DEDUPLICATION, address_of
from napkin.errors import NapkinError

LEAST_FOUND = 0.9
"""The least share of the pairs at the threshold itself that bands find."""
_POINTS = 2000


@dataclass(frozen=True)
class Banding:
    """b bands of r rows."""

    bands: int
    rows: int

    def probability(self, similarity: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
        """That two documents of this similarity share a band."""
        return 1 - (1 - similarity**self.rows) ** self.bands

    def keys(self, signatures: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """A hash per band and document, of shape [bands, documents]; two documents share a band if theirs are equal."""
        DEDUPLICATION.load("sketches")
        from napkin.curation.deduplication.compiled.sketches import band_keys

        signatures = np.ascontiguousarray(signatures)
        count, hashes = signatures.shape
        keys = np.empty((self.bands, count), np.uint64)
        band_keys(address_of(signatures), count, hashes, self.bands, self.rows, address_of(keys))
        return keys


def choose_banding(
    threshold: float, hashes: int, *, least_found: float = LEAST_FOUND, false_positive_weight: float = 0.5
) -> Banding:
    """Of the bands and rows that find enough pairs at the threshold, those with the smallest weighted error: the area
    under the curve below the threshold (pairs that are found and should not be), and the area above the curve from the
    threshold on (pairs that are missed).

    Where no bands find so many, as of few hashes at a low threshold, those that find the most at the threshold.

    Args:
        threshold: the Jaccard similarity from which documents count as near-duplicates, above 0 and below 1.
        hashes: of a signature; bands · rows is at most that.
        least_found: the probability with which a pair at the threshold is found, at least, below 1; 0 looks at the
            areas alone, which are least together where about half of these pairs are missed.
        false_positive_weight: of the first area, from 0 to 1; the second has the rest.

    Raises:
        NapkinError: for a number out of range.
    """
    if not 0 < threshold < 1:
        raise NapkinError(f"the threshold is {threshold:g}: use a similarity above 0 and below 1")
    if not 0 <= false_positive_weight <= 1:
        raise NapkinError(f"the weight of false positives is {false_positive_weight:g}: use a number from 0 to 1")
    if not 0 <= least_found < 1:
        raise NapkinError(f"the least probability is {least_found:g}: use a number from 0 to below 1")
    similarity = (np.arange(_POINTS) + 0.5) / _POINTS
    below = similarity < threshold
    # Bands of one row are shared more often than any others.
    best, chosen = np.inf, Banding(hashes, 1)
    for rows in range(1, hashes + 1):
        missed_by_one = 1 - similarity**rows
        bands = np.arange(1, hashes // rows + 1)
        missed = missed_by_one[:, None] ** bands
        error = false_positive_weight * (1 - missed[below]).sum(0) + (1 - false_positive_weight) * missed[~below].sum(0)
        error = np.where(1 - (1 - threshold**rows) ** bands >= least_found, error, np.inf)
        least = int(np.argmin(error))
        if error[least] < best:
            best, chosen = float(error[least]), Banding(int(bands[least]), rows)
    return chosen
