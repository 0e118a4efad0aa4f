"""A linear classifier of texts, trained on a user's positives and negatives, as DataComp-LM's (Li et al. 2024, 4.4).

    score(text) = 1 / (1 + exp(-(scale · w·x + shift))), x: the text's hashed n-grams (n_gram_features.py)

`w` is fitted by L-BFGS to the logistic loss with the penalty |w|^2 / 2 · `penalty`, on 80% of the texts; `scale` and
`shift` calibrate it on 10% (Platt 1999); accuracy and calibration are told of the other 10%. Positives and negatives
weigh alike, however many there are of each: 0.5 is the score of a text that is as likely among the ones as the others.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from napkin.curation.filters.n_gram_features import columns_of, feature_matrix
from napkin.errors import NapkinError

MIN_TEXTS = 20
"""Positives, and negatives, at least: two of each are then held out."""
_BINS = 10


@dataclass(frozen=True)
class QualityModel:
    """Weights per column, and how a sum of them becomes a score."""

    weights: NDArray[np.float32]
    max_n: int
    scale: float
    shift: float

    def score(self, text: str) -> float:
        """The probability that a text is of the positives, between 0 and 1; 0.5 if it has no tokens."""
        columns = columns_of(text, len(self.weights), self.max_n)
        if not len(columns):
            return 0.5
        total = float(self.weights[columns].sum(dtype=np.float64)) / len(columns) ** 0.5
        return float(_sigmoid(np.float64(self.scale * total + self.shift)))


@dataclass(frozen=True)
class HeldOut:
    """What a model makes of texts that it was not trained on; each side weighs half."""

    positives: int
    negatives: int
    accuracy: float
    """At a score of 0.5."""
    area_under_curve: float
    """The probability that a positive has a higher score than a negative."""
    calibration_error: float
    """Mean distance of the score from the fraction of positives, in ten bins of scores."""
    bins: tuple[tuple[float, float, int], ...]
    """Mean score, fraction of positives, and number of texts of each bin that is not empty."""


def train_quality_model(
    positives: Sequence[str],
    negatives: Sequence[str],
    *,
    columns: int = 2**20,
    max_n: int = 2,
    penalty: float = 1e-4,
) -> tuple[QualityModel, HeldOut]:
    """Fit a model, and say how good it is on held-out texts.

    The same texts give the same model, whatever their order: a text's checksum decides what it is used for.

    Raises:
        NapkinError: there are too few texts, or the number of columns is not a power of two.
    """
    if columns < 2 or columns & (columns - 1):
        raise NapkinError(f"columns is {columns}: use a power of two, such as {2**20}")
    sides = [_distinct(texts) for texts in (negatives, positives)]
    for name, texts in zip(("negative", "positive"), sides, strict=True):
        if len(texts) < MIN_TEXTS:
            raise NapkinError(f"there are {len(texts)} different {name} texts: use at least {MIN_TEXTS}")
    # Of each ten texts of a side, one tests, one calibrates.
    parts = [[[text for i, text in enumerate(texts) if i % 10 in part] for texts in sides] for part in _PARTS]
    train, calibrate, test = (_labelled(part, columns, max_n) for part in parts)
    weights = _fit(*train, penalty)
    scale, shift = _calibrated(calibrate[0] @ weights, *calibrate[1:])
    model = QualityModel(weights.astype(np.float32), max_n, scale, shift)
    return model, _held_out(model, test)


_PARTS = (range(8), (8,), (9,))
_Labelled = tuple[Any, NDArray[np.float64], NDArray[np.float64]]


def _distinct(texts: Sequence[str]) -> list[str]:
    by_checksum = {hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(): text for text in texts}
    return [by_checksum[key] for key in sorted(by_checksum)]


def _labelled(sides: list[list[str]], columns: int, max_n: int) -> _Labelled:
    """Features of negatives and positives, their labels -1 and 1, and weights that add up to 1/2 on each side."""
    features = feature_matrix([text for side in sides for text in side], columns, max_n)
    labels = np.repeat([-1.0, 1.0], [len(side) for side in sides])
    weights = np.repeat([0.5 / len(side) for side in sides], [len(side) for side in sides])
    return features, labels, weights


def _fit(features: Any, labels: NDArray[np.float64], weights: NDArray[np.float64], penalty: float) -> NDArray[Any]:
    """The weights of columns with the least mean logistic loss and penalty."""
    from scipy.optimize import minimize

    transposed = features.T.tocsr()

    def loss(w: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        margins = labels * (features @ w)
        slopes = -weights * labels * _sigmoid(-margins)
        value = float(weights @ np.logaddexp(0, -margins) + penalty / 2 * (w @ w))
        return value, transposed @ slopes + penalty * w

    found = minimize(loss, np.zeros(features.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": 200})
    return found.x


def _calibrated(
    sums: NDArray[np.float64], labels: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[float, float]:
    """Scale and shift with the least logistic loss. Labels are softened as Platt's, so that the scale stays finite."""
    from scipy.optimize import minimize

    n = len(labels) / 2
    target = np.where(labels > 0, (n + 1) / (n + 2), 1 / (n + 2))

    def loss(x: NDArray[np.float64]) -> float:
        z = x[0] * sums + x[1]
        return float(weights @ (np.logaddexp(0, z) - target * z))

    scale, shift = minimize(loss, np.array([1.0, 0.0]), method="Nelder-Mead").x
    return float(scale), float(shift)


def _held_out(model: QualityModel, test: _Labelled) -> HeldOut:
    from scipy.stats import rankdata

    features, labels, weights = test
    scores = _sigmoid(model.scale * (features @ model.weights.astype(np.float64)) + model.shift)
    positive = labels > 0
    bins, error = [], 0.0
    places = np.minimum((scores * _BINS).astype(int), _BINS - 1)
    for i in range(_BINS):
        here = places == i
        weight = float(weights[here].sum())
        if weight:
            mean = float(weights[here] @ scores[here]) / weight
            fraction = float(weights[here & positive].sum()) / weight
            bins.append((mean, fraction, int(here.sum())))
            error += weight * abs(mean - fraction)
    positives, negatives = int(positive.sum()), int((~positive).sum())
    # Mann and Whitney: of a positive's rank, what is not due to other positives is due to negatives below it.
    below = float(rankdata(scores)[positive].sum()) - positives * (positives + 1) / 2
    return HeldOut(
        positives=positives,
        negatives=negatives,
        accuracy=float((scores[positive] > 0.5).mean() + (scores[~positive] <= 0.5).mean()) / 2,
        area_under_curve=below / (positives * negatives),
        calibration_error=error,
        bins=tuple(bins),
    )


def _sigmoid(z: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * z))
