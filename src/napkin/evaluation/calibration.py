"""How well a model's probabilities of choices are calibrated: the Brier score, and the expected calibration error with
its reliability table.

The probability of a choice is its likelihood after the question among those of all choices. With p the probabilities of
an item, y 1 for the right choice and 0 for others, and the confidence c the largest of them:

    Brier score = sum over choices of (p - y)²                                 (Brier 1950), a mean over items
    ECE         = sum over bins of (items of the bin / items) · |accuracy - mean confidence|    (Guo et al. 2017)

Bins have equal widths of confidence. The ECE of a finite number of items is above 0 even for a perfectly calibrated
model: `chance` is its expected value then, found by drawing answers with these confidences.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from napkin.evaluation.uncertainty import numbered_groups

N_BINS = 15
_DRAWS = 1000


@dataclass(frozen=True)
class Bin:
    """A row of the table of reliability."""

    low: float
    """Confidence above which an item belongs to the bin."""
    high: float
    items: int
    confidence: float
    """Mean confidence of its items."""
    accuracy: float
    """The fraction of the bin's items whose likeliest choice is right."""


@dataclass(frozen=True)
class Calibration:
    """The calibration of a model on the items of a task with choices."""

    error: float
    """The expected calibration error."""
    standard_error: float
    """The standard error of `error`, by drawing groups of items with replacement."""
    chance: float
    """The mean error of a model that is calibrated, with the same confidences on as many items."""
    overconfidence: float
    """Mean confidence less accuracy."""
    bins: list[Bin]
    """Bins with items."""


def choice_probabilities(logprobs: Sequence[float]) -> np.ndarray:
    """The probability of each choice among all of them, from log-probabilities of any offset."""
    shifted = np.exp(np.array(logprobs, dtype=np.float64) - max(logprobs))
    return shifted / shifted.sum()


def brier_score(probabilities: np.ndarray, right: int) -> float:
    """The squared distance of the probabilities from the right choice: 0 is best, 2 worst."""
    return float(np.square(probabilities).sum() - 2 * probabilities[right] + 1)


def calibration_of(
    confidences: Sequence[float],
    right: Sequence[bool],
    groups: Sequence[Hashable] | None = None,
    *,
    n_bins: int = N_BINS,
    seed: int = 0,
) -> Calibration:
    """The calibration of confidences, each with whether its choice is right; `groups` as in `mean_estimate`."""
    confidence, correct = np.asarray(confidences, dtype=np.float64), np.asarray(right, dtype=np.float64)
    places = np.clip(np.ceil(confidence * n_bins).astype(np.int64) - 1, 0, n_bins - 1)
    labels, n_groups = numbered_groups(groups or range(len(confidence)))
    random = np.random.default_rng(seed)

    def error(hits: np.ndarray, counts: np.ndarray | None = None) -> float:
        weights = np.ones(len(hits)) if counts is None else counts
        gaps = np.bincount(places, weights=weights * (hits - confidence), minlength=n_bins)
        return float(np.abs(gaps).sum() / weights.sum())

    drawn = []
    for _ in range(_DRAWS):
        counts = np.bincount(random.integers(0, n_groups, n_groups), minlength=n_groups)
        drawn.append(error(correct, counts[labels].astype(np.float64)))
    chance = np.mean([error((random.random(len(confidence)) < confidence).astype(np.float64)) for _ in range(_DRAWS)])
    bins = [
        Bin(
            place / n_bins,
            (place + 1) / n_bins,
            int(inside.sum()),
            float(confidence[inside].mean()),
            float(correct[inside].mean()),
        )
        for place in range(n_bins)
        if (inside := places == place).any()
    ]
    return Calibration(
        error(correct), float(np.std(drawn, ddof=1)), float(chance), float((confidence - correct).mean()), bins
    )
