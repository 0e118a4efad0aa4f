"""How much a fit hangs on single runs: every run left out in turn, and a number of runs left out together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from napkin.scaling.fitted_law import Interval
from napkin.scaling.law_fit import LawFit, fit_law
from napkin.scaling.observations import Observation
from napkin.scaling.robust_fit import fit_batch

MOST_LEFT_OUT = 400
"""Of more runs, those with the largest residuals are left out in turn."""


@dataclass(frozen=True)
class LeftOut:
    """What changes without a run."""

    run: Observation
    coefficients: dict[str, float]
    """Of the run's training set, as they are without it."""
    error: float
    """log of its loss over what the law of the others says of it."""
    shift: float
    """The largest change of a coefficient, in units of half its 90% interval."""


def leave_one_out(fitted: LawFit) -> list[LeftOut]:
    """The fit without each run in turn, those that matter most first."""
    runs, law = fitted.runs, fitted.law
    order = np.argsort(-np.abs(fitted.residuals), kind="stable")[:MOST_LEFT_OUT]
    weights = np.ones((len(order), len(runs)))
    weights[np.arange(len(order)), order] = 0
    log_losses = np.log([run.loss for run in runs])
    starts = np.repeat(law.theta[None], len(order), 0)
    thetas, _ = fit_batch(fitted.terms, log_losses, weights, starts, delta=fitted.delta)
    errors = log_losses[order] - fitted.terms.log_losses(thetas)[np.arange(len(order)), order]
    found = []
    for row, index in enumerate(order):
        group = runs[index].group
        without = {
            name: float(values[0]) for name, values in law.model.coefficients(thetas[row : row + 1], group).items()
        }
        shift = max(_shift(without[name], interval) for name, interval in law.coefficients[group].items())
        found.append(LeftOut(runs[index], without, float(errors[row]), shift))
    return sorted(found, key=lambda each: -each.shift)


def refit_with(fitted: LawFit, more: Sequence[Observation]) -> LawFit:
    """The same fit with other runs beside, such as those that were dropped."""
    return fit_law([*fitted.runs, *more], fitted.law.form.name, delta=fitted.delta, draws=2)


def _shift(value: float, interval: Interval) -> float:
    half = (interval.high - interval.low) / 2
    return abs(value - interval.estimate) / half if half > 0 else 0.0
