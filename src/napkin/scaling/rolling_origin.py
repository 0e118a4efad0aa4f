"""How far a law errs beyond its runs, found by rolling the origin: it is fitted to the runs of up to a budget of FLOPs,
predicts those of more, and so on from budget to budget.

    error of a run at compute C from runs up to C₀ ~ normal of variance  s² · (1 + h) + (ρ · log(C/C₀))²

s is the scatter of the fitted runs and h the leverage of the predicted one, which is the uncertainty of the
coefficients. The rest is the law's own error. A law that is not quite true has a wrong slope, so its error grows with
the logarithm of the distance. ρ is estimated from the runs themselves, and where they are few, mostly from those of
others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from napkin.errors import NapkinError
from napkin.scaling.law_forms import LawForm, SumOfTerms, Values, fit_batch, refuse_too_few, scatter, values_of
from napkin.scaling.observations import Observation

LEVEL_FACTOR = 2.0
"""Origins are at least this factor of FLOPs apart."""
_FEWEST = 8
_SAME = 1 + 1e-4
_RATES = 40

# The prior of ρ and the weight of own runs were chosen on the runs of Hoffmann, Gadre and Li et al. (2022, 2024, 2025):
# the greatest density of the runs beyond an origin, where 90% intervals hold 90% or more in each of these sources.
# `benchmarks/scaling_laws.py` shows them on other sources.
_PRIOR_RATE, _PRIOR_SPREAD = 0.004, 1.0
"""The median of ρ, error per factor of e in FLOPs, and the standard deviation of its logarithm."""
_ORIGIN_WEIGHT, _OLDER = 8, 0.25
"""An origin counts as at most this many runs, since the errors of one origin are correlated; after this many newer
runs, its weight falls to this fraction."""
_BETWEEN_ORIGINS = 0.5
"""Standard deviation of log ρ from one origin to the next of the same runs: the next budget may be less kind."""


@dataclass(frozen=True)
class Origin:
    """A law fitted to the runs up to a budget, and its errors on the runs beyond."""

    flops: float
    """The most FLOPs of a fitted run."""
    fitted: int
    scatter: float
    """Robust standard deviation of the fitted runs about the law, enlarged for the coefficients."""
    errors: Values
    """[runs beyond]: log of the measured loss over the predicted one."""
    distances: Values
    """[runs beyond]: log of their FLOPs over `flops`."""
    leverages: Values
    """[runs beyond]: variance of the prediction by the coefficients, in units of the scatter's."""


def rolling_origins(
    form: LawForm,
    terms: SumOfTerms,
    runs: Sequence[Observation],
    theta: Values,
    usable: NDArray[np.bool_],
    *,
    delta: float,
) -> tuple[Origin, ...]:
    """The origins at factors of 2 of the least FLOPs from which the law can be fitted, in their order.

    All fits are one batch that begins at the law of all runs. Runs of a training set of which too few are fitted are
    not predicted, nor are those that are not `usable`, such as outliers.
    """
    compute, log_losses = values_of(runs, "compute"), np.log(values_of(runs, "loss"))
    groups = np.array([run.group for run in runs])
    coefficients = len(theta)
    levels = np.floor(np.log(compute / compute.min() * _SAME) / np.log(LEVEL_FACTOR))
    cuts: list[float] = []
    for level in np.unique(levels)[:-1]:
        fitted = levels <= level
        if fitted.sum() < max(_FEWEST, coefficients + 2):
            continue
        try:
            refuse_too_few(form, [run for run, kept in zip(runs, fitted, strict=True) if kept])
        except NapkinError:
            continue
        cuts.append(float(compute[fitted].max()))
    if not cuts:
        return ()
    weights = (compute[None] <= np.array(cuts)[:, None] * _SAME).astype(np.float64)
    thetas, _ = fit_batch(terms, log_losses, weights, np.repeat(theta[None], len(cuts), 0), delta=delta)
    predicted, jacobians = terms.with_jacobian(thetas)
    origins: list[Origin] = []
    for cut, weight, prediction, jacobian in zip(cuts, weights, predicted, jacobians, strict=True):
        fitted = weight > 0
        known = [name for name in np.unique(groups) if (groups[fitted] == name).sum() > len(form.constants)]
        beyond = ~fitted & usable & np.isin(groups, known)
        if not beyond.any():
            continue
        errors = log_losses - prediction
        count = int(fitted.sum())
        origins.append(
            Origin(
                flops=cut,
                fitted=count,
                scatter=scatter(errors[fitted]) * float(np.sqrt(count / (count - coefficients))),
                errors=errors[beyond],
                distances=np.log(compute[beyond] / cut),
                leverages=_leverages(jacobian[fitted], jacobian[beyond]),
            )
        )
    return tuple(origins)


@dataclass(frozen=True)
class RollingError:
    """The errors of a law on the runs beyond each origin."""

    median: float
    """Median of |log(loss / predicted)|."""
    most: float
    """The 90th percentile: nine tenths of the errors are smaller."""
    bias: float
    """Median of log(loss / predicted)."""
    predictions: int
    origins: int
    farthest: float
    """FLOPs of the farthest predicted run over those of its origin."""


def rolling_error(origins: Sequence[Origin]) -> RollingError:
    """The errors of all origins together, of which there is at least one."""
    errors = np.concatenate([origin.errors for origin in origins])
    median, most = np.quantile(np.abs(errors), [0.5, 0.9])
    farthest = max(float(origin.distances.max()) for origin in origins)
    bias = float(np.median(errors))
    return RollingError(float(median), float(most), bias, len(errors), len(origins), float(np.exp(farthest)))


def _leverages(fitted: Values, predicted: Values) -> Values:
    """j (JᵀJ)⁻¹ jᵀ of each row j of `predicted` for the rows J of `fitted`."""
    curvature = fitted.T @ fitted
    curvature = curvature + np.diag(1e-9 * np.diag(curvature) + 1e-30)
    inverse = np.linalg.pinv(curvature, rcond=1e-13, hermitian=True)
    return np.einsum("np,pq,nq->n", predicted, inverse, predicted)


def discrepancy_rates(origins: Sequence[Origin]) -> tuple[float, ...]:
    """Equally likely values of ρ for the runs beyond all of these, smallest first.

    The posterior of the law's rate on a grid of logarithms, from a log-normal prior and the mean log density of the
    errors beyond each origin; each origin's rate scatters about the law's, and so does the next.
    """
    grid = np.linspace(np.log(2e-4), np.log(0.25), 113)
    between = np.exp(-0.5 * ((grid[:, None] - grid[None]) / _BETWEEN_ORIGINS) ** 2)
    between /= between.sum(1, keepdims=True)
    log_posterior = -0.5 * ((grid - np.log(_PRIOR_RATE)) / _PRIOR_SPREAD) ** 2
    newer = 0
    for origin in reversed(origins):
        counted = min(_ORIGIN_WEIGHT, len(origin.errors))
        known = origin.scatter**2 * (1 + origin.leverages)
        variances = known[None] + (np.exp(grid)[:, None] * origin.distances[None]) ** 2
        densities = counted * (-0.5 * (np.log(variances) + origin.errors[None] ** 2 / variances)).mean(1)
        largest = densities.max()
        likelihood = np.log(between @ np.exp(densities - largest) + 1e-300)
        log_posterior = log_posterior + _OLDER ** (newer / _ORIGIN_WEIGHT) * likelihood
        newer += counted
    posterior = np.exp(log_posterior - log_posterior.max())
    next_rate = (posterior / posterior.sum()) @ between
    below = np.cumsum(next_rate) - next_rate / 2
    return tuple(np.exp(np.interp((np.arange(_RATES) + 0.5) / _RATES, below, grid)).tolist())
