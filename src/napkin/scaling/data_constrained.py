"""Runs that repeat their training text: what a repeated token is worth (Muennighoff et al. 2023).

    D' = U + U·R_D*·(1 − exp(−R_D/R_D*)),   R_D = D/U − 1 repetitions of U unique tokens
    N' = V + V·R_N*·(1 − exp(−R_N/R_N*)),   R_N = N/V − 1, V = the size that is best for U tokens, at most N
    loss = E + A/N'^alpha + B/D'^beta

Repetitions lose their worth exponentially: the first ones count as new tokens, R_D* is where 1 − 1/e of all that
repeating can give has been had. The law without repetitions is fitted first, R_D* and R_N* then.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from napkin.errors import NapkinError
from napkin.scaling.fitted_law import FittedLaw, Interval, interval_of, interval_of_new_run, quantile_shares
from napkin.scaling.law_fit import SEED, fit_law
from napkin.scaling.law_forms import HUBER_DELTA, Values, huber
from napkin.scaling.observations import FLOPS_PER_PARAMETER_AND_TOKEN, Observation

_REPEATED = 1.01
"""A run with more tokens per unique token than this repeats some."""
_FEWEST = 4
_DRAWS = 100
_LEAST, _MOST = np.log(1e-2), np.log(1e5)


@dataclass(frozen=True)
class DataConstrainedLaw:
    """A law of parameters, tokens and unique tokens."""

    base: FittedLaw
    """Chinchilla's law of runs without repetitions."""
    repeated_tokens: Interval
    """R_D*"""
    repeated_parameters: Interval
    """R_N*"""
    residuals: Values
    """[repeating runs]: log of the measured loss over the law's."""
    _draws: Values
    """[draws, 2]: logarithms of R_D* and R_N*."""
    _thetas: Values
    """[draws, coefficients] of the law without repetitions."""

    def predict(self, parameters: float, tokens: float, unique_tokens: float) -> Interval:
        """The loss of a new run with `tokens` tokens, of which `unique_tokens` are different."""
        sizes = np.array([[parameters, tokens, unique_tokens]])
        if not (np.isfinite(sizes).all() and sizes.min() > 0):
            raise NapkinError("parameters, tokens and unique tokens have to be above 0: give such numbers")
        stars = np.log([self.repeated_tokens.estimate, self.repeated_parameters.estimate])
        point = float(_log_losses(self.base, self.base.theta, stars, sizes)[0])
        draws = zip(self._thetas, self._draws, strict=True)
        drawn = np.array([_log_losses(self.base, theta, star, sizes)[0] for theta, star in draws])
        beyond = self.base.discrepancy(FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens)
        return interval_of_new_run(point, drawn, np.quantile(self.residuals, quantile_shares()), beyond)

    def worth(self, epochs: float) -> Interval:
        """The share of new tokens' worth that tokens have on average over so many epochs: D'/D."""
        if not 1 <= epochs < 1e6:
            raise NapkinError(f"{epochs:g} epochs: use 1 or more")
        star = self.repeated_tokens
        low, middle, high = (
            float(_effective(np.array([float(epochs)]), np.ones(1), each)[0] / epochs)
            for each in (star.low, star.estimate, star.high)
        )
        return Interval(middle, low, high)

    def as_values(self, epochs: Sequence[float] = (2, 4, 8, 16, 40)) -> dict[str, Any]:
        """The law for programs, with what a token is worth over some numbers of epochs."""
        base = self.base.coefficients[self.base.groups[0]]
        return {
            "law": "data-constrained",
            "repeated_tokens": asdict(self.repeated_tokens),
            "repeated_parameters": asdict(self.repeated_parameters),
            "without_repetitions": {name: asdict(each) for name, each in base.items()},
            "worth": {f"{each:g}": asdict(self.worth(each)) for each in epochs},
        }


def fit_data_constrained(
    runs: Sequence[Observation], base: FittedLaw | None = None, *, delta: float = HUBER_DELTA
) -> DataConstrainedLaw:
    """Fit R_D* and R_N* to runs of which some repeat tokens, which `unique_tokens` tells.

    `base` is Chinchilla's law of one training set; None fits it to the runs without repetitions. `delta` is where
    Huber's loss of the log loss becomes linear. Raises NapkinError for fewer than four runs that repeat tokens, too few
    that do not, or another law.
    """
    repeated = [run for run in runs if run.unique_tokens is not None and run.tokens > _REPEATED * run.unique_tokens]
    if len(repeated) < _FEWEST:
        raise NapkinError(
            f"{len(repeated)} runs repeat tokens, {_FEWEST} are needed: give a column unique_tokens "
            "that is smaller than tokens"
        )
    if base is None:
        others = [run for run in runs if run not in repeated]
        try:
            base = fit_law(others, "chinchilla").law
        except NapkinError as error:
            raise NapkinError(f"of the runs without repetitions, {error}") from None
    if base.form.name != "chinchilla" or len(base.groups) > 1:
        raise NapkinError(f"the law without repetitions is '{base.form.name}': fit chinchilla to one training set")
    sizes = np.array([[run.parameters, run.tokens, run.unique_tokens] for run in repeated], dtype=np.float64)
    log_losses = np.log([run.loss for run in repeated])
    stars = _fit(base, base.theta, sizes, log_losses, np.ones(len(repeated)), delta)
    random = np.random.default_rng(SEED)
    thetas = base.draws[random.integers(0, len(base.draws), _DRAWS)]
    weights = random.exponential(size=(_DRAWS, len(repeated)))
    drawn = zip(thetas, weights, strict=True)
    draws = np.array([_fit(base, theta, sizes, log_losses, weight, delta, start=stars) for theta, weight in drawn])
    of_tokens, of_parameters = (
        Interval(*(float(np.exp(each)) for each in (found.estimate, found.low, found.high)))
        for found in (interval_of(float(star), drawn) for star, drawn in zip(stars, draws.T, strict=True))
    )
    residuals = log_losses - _log_losses(base, base.theta, stars, sizes)
    return DataConstrainedLaw(base, of_tokens, of_parameters, residuals, draws, thetas)


def _fit(
    base: FittedLaw,
    theta: Values,
    sizes: Values,
    log_losses: Values,
    weights: Values,
    delta: float,
    start: Values | None = None,
) -> Values:
    """Logarithms of R_D* and R_N*."""
    from scipy.optimize import minimize

    def objective(stars: Values) -> float:
        residuals = log_losses - _log_losses(base, theta, np.clip(stars, _LEAST, _MOST), sizes)
        # A gentle pull to the middle keeps what the runs do not tell from running away.
        return float((weights * huber(residuals, delta)).sum()) / delta + 1e-6 * float(((stars - 2) ** 2).sum())

    starts = [start] if start is not None else [np.array([d, n]) for d in (0.7, 2.7, 4.6) for n in (0.7, 2.7)]
    options = {"xatol": 1e-5, "fatol": 1e-10, "maxiter": 400 if start is None else 150}
    minima = [minimize(objective, each, method="Nelder-Mead", options=options) for each in starts]
    return np.clip(min(minima, key=lambda each: float(each.fun)).x, _LEAST, _MOST)


def _log_losses(base: FittedLaw, theta: Values, stars: Values, sizes: Values) -> Values:
    """[runs] for sizes [runs, (parameters, tokens, unique tokens)]."""
    values = {name: float(each[0]) for name, each in base.model.coefficients(theta[None], base.groups[0]).items()}
    parameters, tokens, unique = sizes.T
    a, b = values["alpha"], values["beta"]
    # On the line of best sizes the two terms have slopes in proportion: alpha·A/N^alpha = beta·B/D^beta.
    best = (a * values["A"] / (b * values["B"])) ** (1 / a) * unique ** (b / a)
    data = _effective(tokens, np.minimum(unique, tokens), float(np.exp(stars[0])))
    model = _effective(parameters, np.minimum(best, parameters), float(np.exp(stars[1])))
    return np.log(values["E"] + values["A"] / model**a + values["B"] / data**b)


def _effective(whole: Values, unique: Values, star: float) -> Values:
    """The number of unique tokens or parameters that `whole` is worth, of which `unique` is new."""
    return unique + unique * star * -np.expm1(-(whole / unique - 1) / star)
