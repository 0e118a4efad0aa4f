"""A linear classifier of texts, trained on a user's positives and negatives, as DataComp-LM's (Li et al. 2024, 4.4).

    score(text) = 1 / (1 + exp(-(scale · w·x + shift))), x: the text's hashed n-grams

`w` is fitted by L-BFGS to the logistic loss with the penalty |w|^2 / 2 · `penalty`, on 80% of the texts; `scale` and
`shift` calibrate it on 10% (Platt 1999); accuracy and calibration are told of the other 10%. Positives and negatives
have the same total weight, however many there are of each: 0.5 is the score of a text that is equally likely in both
sets.

Texts as hashed word n-grams: the columns of a sparse matrix, for a linear classifier (fastText, Joulin et al. 2016).

A token is a run of letters, digits and underscores in lower case, or one other character that is not white space.
Tokens and n-grams are hashed into a fixed number of columns (a power of two), so that no vocabulary is kept. A text has
each column once, however often its n-grams occur, and the length 1.

The file of a quality model: safetensors with one tensor, `weights` [columns], and a header of strings.

format = napkin quality model 1, max_n, scale, shift
"""

import hashlib
import math
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from napkin.errors import CorruptFile, NapkinError
from napkin.files import atomic_write_bytes, refuse_irregular

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


_TOKEN = re.compile(r"\w+|[^\w\s]")
# An odd number with bits in all places, by which the hash of each token that follows is distinguished.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)
MAX_CHARACTERS = 20_000
"""Most characters of a text that are read, from its beginning."""


def columns_of(text: str, n_columns: int, max_n: int) -> NDArray[np.int64]:
    """The columns of a text's n-grams of 1 to `max_n` tokens, in ascending order."""
    return np.unique(hashed_ngrams(text, n_columns, max_n))


def hashed_ngrams(text: str, n_columns: int, max_n: int) -> NDArray[np.int64]:
    """The column of each n-gram of 1 to `max_n` tokens of a text; `n_columns` is a power of 2."""
    tokens = _TOKEN.findall(text[:MAX_CHARACTERS].lower())
    # A checksum that is the same in every process.
    hashes = {token: zlib.crc32(token.encode("utf-8", "surrogatepass")) for token in set(tokens)}
    singles = np.array([hashes[token] for token in tokens], np.uint64)
    grams, found = singles, [_mixed(singles)]
    for n in range(2, max_n + 1):
        # Each round appends the token n - 1 places later.
        grams = grams[:-1] * _MULTIPLIER + singles[n - 1 :]
        found.append(_mixed(grams))
    return (np.concatenate(found) & np.uint64(n_columns - 1)).astype(np.int64)


def feature_matrix(texts: Iterable[str], n_columns: int, max_n: int) -> "csr_matrix":
    """Rows of one or more texts, each of length 1 (0 without tokens), of shape [texts, n_columns]."""
    from scipy.sparse import csr_matrix

    rows = [columns_of(text, n_columns, max_n).astype(np.int32) for text in texts]
    ends = np.cumsum([0, *map(len, rows)])
    values = np.concatenate([np.full(len(row), 1 / max(1, len(row)) ** 0.5, np.float32) for row in rows])
    return csr_matrix((values, np.concatenate(rows), ends), shape=(len(rows), n_columns))


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers whose low bits depend on all bits of the given ones."""
    product = numbers * _MULTIPLIER
    product = (product ^ (product >> _SHIFT)) * _MULTIPLIER
    return product >> _SHIFT


MIN_TEXTS = 20
"""The fewest positives, and negatives: two of each are then held out."""
_BINS = 10


@dataclass(frozen=True)
class QualityModel:
    """Weights per column, and the scaling that turns their sum into a score."""

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
    """The accuracy and calibration on texts that the model was not trained on; each side weighs half."""

    positives: int
    negatives: int
    accuracy: float
    """Accuracy at a score of 0.5."""
    area_under_curve: float
    """The probability that a positive has a higher score than a negative."""
    calibration_error: float
    """Mean distance of the score from the fraction of positives, in ten bins of scores."""
    bins: tuple[tuple[float, float, int], ...]
    """Mean score, fraction of positives, and number of texts of each bin that is not empty."""


def train_quality_model(
    positives: Sequence[str], negatives: Sequence[str], *, columns: int = 2**20, max_n: int = 2, penalty: float = 1e-4
) -> tuple[QualityModel, HeldOut]:
    """Fit a model, and measure it on held-out texts.

    The same texts give the same model, whatever their order: a text's checksum decides what it is used for. Raises
    NapkinError for too few texts, and for a number of columns that is not a power of two.
    """
    if columns < 2 or columns & (columns - 1):
        raise NapkinError(f"columns is {columns}: use a power of two, such as {2**20}")
    sides = [_distinct(texts) for texts in (negatives, positives)]
    for name, texts in zip(("negative", "positive"), sides, strict=True):
        if len(texts) < MIN_TEXTS:
            raise NapkinError(f"there are {len(texts)} different {name} texts: use at least {MIN_TEXTS}")
    # Of every ten texts of a side, one is for testing and one for calibration.
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

    result = minimize(loss, np.zeros(features.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": 200})
    return result.x


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


FORMAT = "napkin quality model 1"
MAX_COLUMNS = 2**28
MAX_N = 5


def write_quality_model(path: Path, model: QualityModel) -> None:
    """Write a model to a new file. Raises NapkinError if the file exists or cannot be written."""
    from safetensors.numpy import save

    header = {"format": FORMAT, "max_n": str(model.max_n), "scale": repr(model.scale), "shift": repr(model.shift)}
    atomic_write_bytes(path, save({"weights": model.weights}, header))


def read_quality_model(path: str) -> QualityModel:
    """Read a model; one that was read before and has not changed since is not read again.

    Raises NapkinError for a file that cannot be read or is another, CorruptFile for one that is damaged.
    """
    refuse_irregular(path)
    try:
        status = os.stat(path)
    except OSError as error:
        raise NapkinError(f"the quality model '{path}' cannot be read: {error.strerror}") from None
    return _read(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4)
def _read(path: str, changed: int, size: int) -> QualityModel:
    del changed
    from safetensors import SafetensorError, safe_open

    if size > 4 * MAX_COLUMNS + 2**20:
        raise NapkinError(f"'{path}' has {size} bytes, a quality model at most {4 * MAX_COLUMNS}: it is another file")
    try:
        with safe_open(path, "numpy") as file:
            header = file.metadata() or {}
            weights = file.get_tensor("weights") if header.get("format") == FORMAT else None
    except (SafetensorError, OSError) as error:
        raise CorruptFile(f"'{path}' is not a quality model, or is damaged ({error}): train one again") from None
    if weights is None:
        raise NapkinError(f"'{path}' is not a quality model: make one with `napkin data train-classifier`")
    try:
        max_n, scale, shift = int(header["max_n"]), float(header["scale"]), float(header["shift"])
    except (KeyError, ValueError):
        raise CorruptFile(f"'{path}' is damaged: its header is not whole; train the model again") from None
    n = weights.size
    plausible = weights.shape == (n,) and weights.dtype == np.float32 and 2 <= n <= MAX_COLUMNS and n & (n - 1) == 0
    finite = math.isfinite(scale) and math.isfinite(shift) and np.isfinite(weights).all()
    if not (plausible and finite and 1 <= max_n <= MAX_N):
        raise CorruptFile(f"'{path}' is damaged: its numbers are not those of a quality model; train it again")
    return QualityModel(weights, max_n, scale, shift)
