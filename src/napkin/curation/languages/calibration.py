"""Probabilities that hold: how sharp a classifier's softmax has to be, and how far it is from what comes true.

A text of n n-grams has its logits multiplied by exp(a + b · ln n), with a and b of the least cross-entropy on held-out
texts. That is temperature scaling (Guo et al. 2017) with a temperature that depends on the length: a mean of many
n-grams is surer than one of few.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from napkin.curation.languages.classifier import LanguageClassifier


def fit_sharpness(classifier: LanguageClassifier, texts: Sequence[str], languages: Sequence[str]) -> LanguageClassifier:
    """The classifier with the sharpness that fits labelled texts; those without letters are passed over."""
    plain = replace(classifier, sharpness=(0.0, 0.0))
    logits, labels, lengths = [], [], []
    for text, language in zip(texts, languages, strict=True):
        n_ngrams, _ = plain.sum_of_rows(text)
        if n_ngrams:
            logits.append(plain.logits(text))
            labels.append(classifier.languages.index(language))
            lengths.append(n_ngrams)
    return replace(classifier, sharpness=least_cross_entropy(np.array(logits), np.array(labels), np.array(lengths)))


def least_cross_entropy(
    logits: NDArray[np.float32], labels: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[float, float]:
    """(a, b) of the least mean cross-entropy; logits are [texts, languages], lengths numbers of n-grams."""
    from scipy.optimize import minimize
    from scipy.special import logsumexp

    own = logits[np.arange(len(logits)), labels]

    def cross_entropy(parameters: NDArray[np.float64]) -> float:
        sharp = np.exp(parameters[0] + parameters[1] * np.log(lengths))
        return float((logsumexp(logits * sharp[:, None], axis=1) - own * sharp).mean())

    found = minimize(cross_entropy, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-7})
    return float(found.x[0]), float(found.x[1])


@dataclass(frozen=True)
class Reliability:
    """Guesses whose probabilities are in one interval: their number, mean probability, and the share that is right."""

    guesses: int
    probability: float
    right: float


def reliability(
    probabilities: Sequence[float], right: Sequence[bool], bins: int = 10
) -> tuple[list[Reliability], float]:
    """A reliability diagram of equally wide intervals, and the expected calibration error (Naeini et al. 2015)."""
    values, truth = np.asarray(probabilities, float), np.asarray(right, float)
    interval = np.minimum((values * bins).astype(int), bins - 1)
    rows = [
        Reliability(int(chosen.sum()), float(values[chosen].mean()), float(truth[chosen].mean()))
        for chosen in (interval == i for i in range(bins))
        if chosen.any()
    ]
    return rows, sum(row.guesses * abs(row.probability - row.right) for row in rows) / len(values)
