"""Fit a law to runs: the least sum of Huber losses of the log loss, and bootstrap draws for intervals.

The weight of single runs in a fit is seen by leaving out every run in turn (`leave_one_out`), and laws are compared by
what each, fitted to the runs of little compute, predicts of those of much (`compare_laws`). `fit_power_law` fits
y = K · Π xᵢ^eᵢ by least squares of logarithms, with Student's intervals: best sizes, learning rates, batches.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from napkin.errors import NapkinError
from napkin.scaling.fitted_law import LEVEL, FittedLaw, Interval, LawFile, quantile_shares
from napkin.scaling.law_forms import (
    HUBER_DELTA,
    LAWS,
    LawModel,
    SumOfTerms,
    Values,
    fit,
    fit_batch,
    law_form,
    refuse_too_few,
    scatter,
    values_of,
)
from napkin.scaling.observations import Observation
from napkin.scaling.rolling_origin import Origin, RollingError, discrepancy_rates, rolling_error, rolling_origins

DRAWS = 200
SEED = 20_220_329
FEW = 16
"""Up to this many runs are fitted by least squares, as Huber's loss with a small delta would pass through p of them
exactly."""
_DELTA_OF_FEW = 0.1
OUTLIER = 5.0
"""The residual of an outlier in robust standard deviations."""
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
    origins: tuple[Origin, ...] = ()
    """The law fitted to the runs up to each budget, and its errors on those beyond."""

    @property
    def rms(self) -> float:
        """Root mean square of the residuals."""
        return float(np.sqrt(np.mean(self.residuals**2)))

    @property
    def scatter(self) -> float:
        """The robust standard deviation of the residuals."""
        return scatter(self.residuals)

    @property
    def outliers(self) -> list[Observation]:
        """The runs beyond `OUTLIER` robust standard deviations."""
        return [run for run, beyond in zip(self.runs, outliers(self.residuals), strict=True) if beyond]

    @property
    def below_floor(self) -> list[Observation]:
        """The runs whose loss is below the fitted floor E, so that the law cannot hold for them."""
        floors = {
            group: coefficients["E"].estimate
            for group, coefficients in self.law.coefficients.items()
            if "E" in coefficients
        }
        return [run for run in self.runs if run.loss <= floors.get(run.group, 0.0)]

    def as_values(self, budgets: Sequence[float] = ()) -> dict[str, Any]:
        """The fit for programs, with the optima of some budgets in FLOPs."""
        law = self.law
        return {
            "law": law.form.name,
            "formula": law.form.formula,
            "runs": len(self.runs),
            "delta": self.delta,
            "coefficients": {
                group: {name: asdict(interval) for name, interval in coefficients.items()}
                for group, coefficients in law.coefficients.items()
            },
            "residuals": {
                "rms": self.rms,
                "scatter": self.scatter,
                "of_runs": self.residuals.tolist(),
                "outliers": [run.source for run in self.outliers],
            },
            "discrepancy": {
                "per_factor_of_e": asdict(law.rate),
                "rolling_origin": asdict(rolling_error(self.origins)) if self.origins else None,
            },
            "ranges": {name: list(limits) for name, limits in law.ranges.items()},
            "optima": {
                group: [
                    {**asdict(each), "extrapolation": law.extrapolation(each.flops)}
                    for each in law.optima(budgets, group=group)
                ]
                for group in law.groups
            },
        }


def fit_law(
    runs: Sequence[Observation], law: str = "chinchilla", *, delta: float | None = None, draws: int = DRAWS
) -> LawFit:
    """Fit a law by the least sum of Huber losses of the residuals of the log loss.

    Of runs on several training sets exponents are common and constants are each set's own. The search begins at a grid
    of starts and is deterministic. Intervals are those of a bootstrap: of random weights of the runs (Rubin 1981), or
    of normal scatter about the law of up to 16 runs.

    `delta` is where Huber's loss becomes linear; large values give least squares. None is 1e-3 (Hoffmann et al. 2022),
    or a fifth of the runs' scatter about the law where that is more, as in the data of that paper; of up to 16 runs
    0.1, which is least squares for all but diverged runs. Raises NapkinError for too few runs, or runs of one size.
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
    origins = rolling_origins(form, terms, runs, theta, ~outliers(residuals), delta=chosen)
    content = LawFile(
        law=form.name,
        groups=model.groups,
        centres=dict(model.centres),
        theta=tuple(theta.tolist()),
        draws=tuple(map(tuple, drawn.tolist())),
        residuals=scattered,
        rates=discrepancy_rates(origins),
        runs=len(runs),
        ranges={
            name: (float(values_of(runs, name).min()), float(values_of(runs, name).max()))
            for name in ("parameters", "tokens", "compute")
        },
    )
    return LawFit(FittedLaw(content), tuple(runs), residuals, chosen, terms, origins)


def fit_chinchilla(runs: Sequence[Observation], *, delta: float | None = None) -> FittedLaw:
    """Fit E + A/N^α + B/D^β (Hoffmann et al. 2022, approach 3); see `fit_law`."""
    return fit_law(runs, "chinchilla", delta=delta).law


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

    Up to `FEW` runs are too few to show their scatter: residuals are taken to be normal with a variance that is itself
    drawn (s²·f/χ², f = n − p), which is Student's t; each draw adds them to the law and fits again. Of more runs, each
    draw weights the runs at random (Rubin 1981), which holds for any scatter.
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


MOST_LEFT_OUT = 400
"""Most runs that are left out in turn: those with the largest residuals, where there are more."""


@dataclass(frozen=True)
class LeftOut:
    """The change of a fit without one run."""

    run: Observation
    coefficients: dict[str, float]
    """Coefficients of the run's training set, as they are without it."""
    error: float
    """Logarithm of its loss over the loss predicted by the law of the other runs."""
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
        left = law.model.coefficients(thetas[row : row + 1], group)
        without = {name: float(values[0]) for name, values in left.items()}
        shifts = [0.0]
        for name, interval in law.coefficients[group].items():
            half = (interval.high - interval.low) / 2
            shifts.append(abs(without[name] - interval.estimate) / half if half > 0 else 0.0)
        found.append(LeftOut(runs[index], without, float(errors[row]), max(shifts)))
    return sorted(found, key=lambda each: -each.shift)


def refit_with(fitted: LawFit, more: Sequence[Observation]) -> LawFit:
    """The same fit with further runs added, such as those that were dropped."""
    return fit_law([*fitted.runs, *more], fitted.law.form.name, delta=fitted.delta, draws=2)


@dataclass(frozen=True)
class PowerLaw:
    """A fitted power law."""

    constant: Interval
    exponents: dict[str, Interval]
    """Intervals by variable."""
    points: int
    scatter: float
    """Standard deviation of log y about the law."""
    _theta: Values
    _covariance: Values
    _quantile: float

    def predict(self, **variables: float) -> Interval:
        """y where the law's curve runs, with the interval of the curve (not of a single new point)."""
        if set(variables) != set(self.exponents):
            raise NapkinError(
                f"the law needs {', '.join(self.exponents)}, and gets {', '.join(variables) or 'nothing'}"
            )
        if any(not 0 < value < 1e40 for value in variables.values()):
            raise NapkinError("a power law predicts for numbers above 0 alone: give such ones")
        row = np.array([1.0, *(np.log(variables[name]) for name in self.exponents)])
        middle = float(row @ self._theta)
        half = self._quantile * float(np.sqrt(max(row @ self._covariance @ row, 0.0)))
        return Interval(float(np.exp(middle)), float(np.exp(middle - half)), float(np.exp(middle + half)))


def fit_power_law(y: Sequence[float] | Values, **variables: Sequence[float] | Values) -> PowerLaw:
    """Fit y = K · x₁^e₁ · x₂^e₂ … to [points] of y and of each variable.

    Raises NapkinError for fewer points than coefficients + 1, numbers that are not above 0, and variables that do not
    vary or vary together.
    """
    from scipy.special import stdtrit

    names = list(variables)
    columns = np.array([np.asarray(variables[name], dtype=np.float64) for name in names])
    values = np.asarray(y, dtype=np.float64)
    if (
        not names
        or not np.isfinite(columns).all()
        or not np.isfinite(values).all()
        or min(columns.min(initial=1), values.min(initial=1)) <= 0
    ):
        raise NapkinError("a power law is fitted to numbers above 0 alone: leave others out")
    coefficients = len(names) + 1
    if len(values) < coefficients + 1:
        raise NapkinError(
            f"a power law of {', '.join(names)} needs {coefficients + 1} points, {len(values)} are given: add some"
        )
    logs = np.log(columns)
    centres = logs.mean(axis=1)
    design = np.column_stack([np.ones(len(values)), (logs - centres[:, None]).T])
    if np.linalg.matrix_rank(design, tol=1e-6 * float(np.sqrt(len(values)))) < coefficients:
        raise NapkinError(
            f"{', '.join(names)} do not vary, or only together: a power law needs points that differ in each"
        )
    theta, *_ = np.linalg.lstsq(design, np.log(values), rcond=None)
    residuals = np.log(values) - design @ theta
    freedom = len(values) - coefficients
    variance = float(residuals @ residuals) / freedom
    covariance = variance * np.linalg.inv(design.T @ design)
    # Back from the centre to 1 of each variable.
    shift = np.eye(coefficients)
    shift[0, 1:] = -centres
    theta, covariance = shift @ theta, shift @ covariance @ shift.T
    quantile = float(stdtrit(freedom, (1 + LEVEL) / 2))
    half = quantile * np.sqrt(np.maximum(np.diag(covariance), 0.0))
    constant, *exponents = (
        Interval(float(at), float(at - by), float(at + by)) for at, by in zip(theta, half, strict=True)
    )
    return PowerLaw(
        Interval(*(float(np.exp(np.clip(at, -700, 700))) for at in (constant.estimate, constant.low, constant.high))),
        dict(zip(names, exponents, strict=True)),
        len(values),
        float(np.sqrt(variance)),
        theta,
        covariance,
        quantile,
    )


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
    rolling: RollingError | None
    """The errors from all budgets on; None where no budget has runs enough below it."""
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

    Beside it stand the errors of rolling the origin from budget to budget over all runs (`rolling_origin`).

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
            fit = fit_law(fitted, name, delta=delta)
            origins = fit_law(runs, name, delta=delta, draws=2).origins
            predictions = [
                fit.law.predict(run.parameters, run.tokens, flops=run.flops, group=run.group) for run in predicted
            ]
        except NapkinError as error:
            failed[name] = str(error)
            continue
        errors = np.array([run.loss / each.estimate - 1 for run, each in zip(predicted, predictions, strict=True)])
        scores.append(
            LawScore(
                law=name,
                formula=LAWS[name].formula,
                median_error=float(np.median(np.abs(errors))),
                worst_error=float(np.max(np.abs(errors))),
                bias=float(np.median(errors)),
                coverage=float(np.mean([run.loss in each for run, each in zip(predicted, predictions, strict=True)])),
                half_width=float(np.median([each.relative for each in predictions])),
                in_sample=float(np.median(np.abs(fit.residuals))),
                rolling=rolling_error(origins) if origins else None,
                errors=errors,
            )
        )
    if not scores:
        raise NapkinError(f"no law can be fitted: {next(iter(failed.values()))}")
    scores.sort(key=lambda score: score.median_error)
    tied = tuple(score.law for score in scores[1:] if _cannot_be_told_apart(scores[0], score))
    ratio = predicted[-1].compute / fitted[-1].compute
    return LawComparison(tuple(scores), failed, len(fitted), len(predicted), ratio, tied)


def _cannot_be_told_apart(best: LawScore, other: LawScore) -> bool:
    from scipy.special import stdtrit

    differences = np.abs(other.errors) - np.abs(best.errors)
    half = stdtrit(len(differences) - 1, 0.95) * np.std(differences, ddof=1) / np.sqrt(len(differences))
    return bool(abs(np.mean(differences)) <= half)
