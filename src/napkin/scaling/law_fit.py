"""Fit a law to runs: the least sum of Huber losses of the log loss, and bootstrap draws for intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from napkin.errors import NapkinError
from napkin.scaling.fitted_law import LEVEL, FittedLaw, LawFile, quantile_shares
from napkin.scaling.law_forms import FIXED, LawForm, LawModel, law_form, values_of
from napkin.scaling.observations import Observation
from napkin.scaling.robust_fit import HUBER_DELTA, SumOfTerms, Values, fit, fit_batch

DRAWS = 200
SEED = 20_220_329
FEW = 16
"""Up to so many runs are fitted by squares, as Huber's loss with a small delta passes through p of them exactly."""
_DELTA_OF_FEW = 0.1
OUTLIER = 5.0
"""Robust standard deviations."""
_EXACT = 1e-9
_DELTA_PER_SCATTER = 0.2


@dataclass(frozen=True)
class LawFit:
    """A fitted law with the runs that it was fitted to."""

    law: FittedLaw
    runs: tuple[Observation, ...]
    residuals: Values
    """[runs]: log of the measured loss over the law's."""
    delta: float
    terms: SumOfTerms
    """The model of these runs."""

    @property
    def rms(self) -> float:
        """Root mean square of the residuals."""
        return float(np.sqrt(np.mean(self.residuals**2)))


def fit_law(
    runs: Sequence[Observation],
    law: str = "chinchilla",
    *,
    delta: float | None = None,
    draws: int = DRAWS,
) -> LawFit:
    """Fit a law by the least sum of Huber losses of the residuals of the log loss.

    Of runs on several training sets exponents are common and constants are each set's own. The search begins at a grid
    of starts and is deterministic. Intervals are those of a bootstrap: of random weights of the runs (Rubin 1981), or
    of normal scatter about the law of up to 16 runs.

    Args:
        runs: finished runs, more than the law has coefficients.
        law: a name of `LAWS`.
        delta: where Huber's loss becomes linear; large values give least squares. None is 1e-3 (Hoffmann et al. 2022),
            or a fifth of the runs' scatter about the law where that is more, as in the data of that paper; of up to 16
            runs 0.1, which is least squares for all but diverged runs.
        draws: of the bootstrap.

    Raises:
        NapkinError: for too few runs, or runs of one size only.
    """
    form = law_form(law)
    if delta is not None and not 1e-6 <= delta <= 10:
        raise NapkinError(f"delta is {delta:g}: use 1e-6 to 10, in units of the log loss")
    refuse_too_few(form, runs)
    model = LawModel.of(form, runs)
    variables = {name: values_of(runs, name) for name in form.variables}
    terms = model.terms(variables, [run.group for run in runs])
    log_losses = np.log(values_of(runs, "loss"))
    chosen = delta or (_DELTA_OF_FEW if len(runs) <= FEW else HUBER_DELTA)
    theta = fit(terms, log_losses, model.starts(log_losses), delta=chosen)
    residuals = log_losses - terms.log_losses(theta[None])[0]
    if delta is None and chosen < _DELTA_PER_SCATTER * scatter(residuals):
        chosen = _DELTA_PER_SCATTER * scatter(residuals)
        theta = fit(terms, log_losses, np.concatenate([theta[None], model.starts(log_losses)]), delta=chosen)
        residuals = log_losses - terms.log_losses(theta[None])[0]
    drawn, scattered = _draws(terms, log_losses, theta, residuals, draws, chosen)
    content = LawFile(
        law=form.name,
        groups=model.groups,
        centres=dict(model.centres),
        theta=tuple(theta.tolist()),
        draws=tuple(map(tuple, drawn.tolist())),
        residuals=scattered,
        runs=len(runs),
        ranges={
            name: (float(values_of(runs, name).min()), float(values_of(runs, name).max()))
            for name in ("parameters", "tokens", "compute")
        },
    )
    return LawFit(FittedLaw(content), tuple(runs), residuals, chosen, terms)


def fit_chinchilla(runs: Sequence[Observation], *, delta: float | None = None) -> FittedLaw:
    """Fit E + A/N^α + B/D^β (Hoffmann et al. 2022, approach 3); see `fit_law`."""
    return fit_law(runs, "chinchilla", delta=delta).law


def refuse_too_few(form: LawForm, runs: Sequence[Observation]) -> None:
    """Raise NapkinError where the runs cannot determine the law's coefficients."""
    groups = tuple(dict.fromkeys(run.group for run in runs))
    needed = form.n_coefficients(max(len(groups), 1)) + 1
    if len(runs) < needed:
        raise NapkinError(
            f"the law '{form.name}' needs {needed} runs or more, {len(runs)} {'is' if len(runs) == 1 else 'are'} "
            "given: add runs, or choose a law with fewer coefficients, such as gadre or kaplan-c"
        )
    for variable in form.variables:
        exponent = next(term.exponent for term in form.terms if term.variable == variable)
        distinct = len({round(float(np.log(value)), 6) for value in values_of(runs, variable)})
        # Two values of a variable give a power and a floor no third equation; an exponent in common does.
        own = [term.exponent for term in form.terms].count(exponent) == 1 and exponent not in FIXED
        least = 3 if own and form.outer_exponent is None else 2
        if distinct < least:
            of = "1 value" if distinct == 1 else f"{distinct} values"
            raise NapkinError(f"all runs have {of} of {variable}: the law '{form.name}' needs {least} or more of them")


def scatter(residuals: Values) -> float:
    """The robust standard deviation of residuals: 1.4826 · median of |residual|."""
    return 1.4826 * float(np.median(np.abs(residuals)))


def outliers(residuals: Values) -> NDArray[np.bool_]:
    """[runs]: whether a residual is beyond `OUTLIER` robust standard deviations.

    So are runs that diverged, or ended before their warm-up did. They are told, have little weight in a fit, and none
    in how much a new run is expected to scatter.
    """
    return np.abs(residuals) > OUTLIER * max(scatter(residuals), _EXACT)


def _draws(
    terms: SumOfTerms, log_losses: Values, theta: Values, residuals: Values, draws: int, delta: float
) -> tuple[Values, tuple[float, ...]]:
    """θ of bootstrap draws [draws, coefficients], and quantiles of how a new run scatters about the law.

    Up to `FEW` runs do not tell how they scatter: residuals are normal with a variance that is itself drawn (s²·f/χ²,
    f = n − p), which is Student's t; each draw adds them to the law and fits again. Of more runs, each draw weights the
    runs at random (Rubin 1981), which holds for any scatter.
    """
    from scipy.special import ndtri, stdtrit

    random = np.random.default_rng(SEED)
    runs, coefficients = len(log_losses), len(theta)
    starts = np.repeat(theta[None], draws, 0)
    kept = residuals[~outliers(residuals)]
    if runs <= FEW:
        freedom = runs - coefficients
        deviation = float(np.sqrt(np.sum(kept**2) / max(len(kept) - coefficients, 1)))
        deviations = deviation * np.sqrt(freedom / random.chisquare(freedom, size=(draws, 1)))
        noise = deviations * random.standard_normal((draws, runs))
        drawn = fit_batch(terms, log_losses - residuals + noise, np.ones((draws, runs)), starts, delta=delta)[0]
        return drawn, tuple((deviation * stdtrit(freedom, quantile_shares())).tolist())
    weights = random.exponential(size=(draws, runs))
    weights /= weights.mean(axis=1, keepdims=True)
    drawn = fit_batch(terms, log_losses, weights, starts, delta=delta)[0]
    # Residuals of a fit are smaller than the scatter about the truth, and n - p are not infinitely many.
    tail = (1 + LEVEL) / 2
    enlarged = float(np.sqrt(runs / (runs - coefficients)) * stdtrit(runs - coefficients, tail) / ndtri(tail))
    return theta + (drawn - theta) * enlarged, tuple(np.quantile(kept * enlarged, quantile_shares()).tolist())
