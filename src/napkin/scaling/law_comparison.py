"""Laws compared: each is fitted to the runs of little compute and predicts those of much."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from napkin.errors import NapkinError
from napkin.scaling.law_fit import fit_law
from napkin.scaling.law_forms import LAWS, Values
from napkin.scaling.observations import Observation

FITTED_SHARE = 0.7
FEWEST_PREDICTED = 3


@dataclass(frozen=True)
class LawScore:
    """The errors of a law that knows the smaller runs on the larger ones."""

    law: str
    formula: str
    median_error: float
    """Median of |loss / predicted - 1|."""
    worst_error: float
    bias: float
    """Median of loss / predicted - 1."""
    coverage: float
    """The share of runs within their 90% intervals."""
    half_width: float
    """Median of half these intervals, as a share of the loss."""
    in_sample: float
    """Median |residual| of the runs that the law was fitted to."""
    errors: Values
    """[predicted runs]"""


@dataclass(frozen=True)
class LawComparison:
    """Laws by their error on runs that they have not seen, the best first."""

    scores: tuple[LawScore, ...]
    failed: dict[str, str]
    """Laws that cannot be fitted, and why."""
    fitted: int
    predicted: int
    extrapolation: float
    """FLOPs of the largest predicted run over those of the largest fitted one."""
    tied: tuple[str, ...]
    """Laws whose error cannot be told from the best one's: the 90% interval of the mean difference holds zero."""


def compare_laws(
    runs: Sequence[Observation],
    laws: Sequence[str] = tuple(LAWS),
    *,
    share: float = FITTED_SHARE,
    delta: float | None = None,
) -> LawComparison:
    """Fit laws to the share of runs with least compute, and score them on the others.

    Raises NapkinError where too few runs are left to predict, or no law can be fitted.
    """
    if not 0 < share < 1:
        raise NapkinError(f"the share of fitted runs is {share:g}: use a number between 0 and 1, such as 0.7")
    order = sorted(runs, key=lambda run: run.compute)
    count = round(share * len(order))
    fitted, predicted = order[:count], order[count:]
    known = {run.group for run in fitted}
    predicted = [run for run in predicted if run.group in known]
    if len(predicted) < FEWEST_PREDICTED:
        raise NapkinError(
            f"{len(predicted)} runs are left to predict, {FEWEST_PREDICTED} are needed: give more runs or a "
            "smaller share"
        )
    scores: list[LawScore] = []
    failed: dict[str, str] = {}
    for name in laws:
        try:
            scores.append(_score(name, fitted, predicted, delta))
        except NapkinError as error:
            failed[name] = str(error)
    if not scores:
        raise NapkinError(f"no law can be fitted: {next(iter(failed.values()))}")
    scores.sort(key=lambda score: score.median_error)
    tied = tuple(score.law for score in scores[1:] if _cannot_be_told_apart(scores[0], score))
    ratio = predicted[-1].compute / fitted[-1].compute
    return LawComparison(tuple(scores), failed, len(fitted), len(predicted), ratio, tied)


def _score(name: str, fitted: Sequence[Observation], predicted: Sequence[Observation], delta: float | None) -> LawScore:
    fit = fit_law(fitted, name, delta=delta)
    found = [fit.law.predict(run.parameters, run.tokens, flops=run.flops, group=run.group) for run in predicted]
    errors = np.array([run.loss / each.estimate - 1 for run, each in zip(predicted, found, strict=True)])
    return LawScore(
        law=name,
        formula=LAWS[name].formula,
        median_error=float(np.median(np.abs(errors))),
        worst_error=float(np.max(np.abs(errors))),
        bias=float(np.median(errors)),
        coverage=float(np.mean([run.loss in each for run, each in zip(predicted, found, strict=True)])),
        half_width=float(np.median([each.relative for each in found])),
        in_sample=float(np.median(np.abs(fit.residuals))),
        errors=errors,
    )


def _cannot_be_told_apart(best: LawScore, other: LawScore) -> bool:
    from scipy.special import stdtrit

    differences = np.abs(other.errors) - np.abs(best.errors)
    half = stdtrit(len(differences) - 1, 0.95) * np.std(differences, ddof=1) / np.sqrt(len(differences))
    return bool(abs(np.mean(differences)) <= half)
