"""The laws that can be fitted: each a sum of powers of parameters N, tokens D or FLOPs C, with their sources.

Their log losses are fitted by Huber's loss, many at once: starts, bootstrap draws and left-out runs are rows of one
batch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from napkin.errors import NapkinError, near_names
from napkin.scaling.observations import Observation

# The model of a log loss is y = s · log Σₖ exp(Xₖ·θ): a sum of powers of parameters and tokens, each power a term, is
# linear in θ inside the exponentials. s is 1, or exp of the last coefficient of θ.

Values = NDArray[np.float64]

HUBER_DELTA = 1e-3
"""Residuals of the log loss beyond this count linearly (Hoffmann et al. 2022, appendix D.3)."""

_MOST_STEPS = 300
_SMALLEST_STEP = 1e-7
_SMALLEST_GAIN = 1e-6
_LONGEST_STEP = 3.0


@dataclass(frozen=True)
class SumOfTerms:
    """The terms of a model of log losses."""

    designs: Values
    """[terms, runs, coefficients]: the logarithm of term k for run n is `designs[k, n] @ θ`."""
    outer_exponent: bool = False
    """True if the sum is raised to exp of one more coefficient, the last of θ."""
    offsets: Values | None = None
    """[terms, runs], added to the logarithms: what does not depend on θ."""

    @property
    def n_coefficients(self) -> int:
        return self.designs.shape[2] + self.outer_exponent

    def log_losses(self, theta: Values) -> Values:
        """[batch, coefficients] → [batch, runs]."""
        return self._evaluate(theta)[0]

    def with_jacobian(self, theta: Values) -> tuple[Values, Values]:
        """[batch, coefficients] → predictions [batch, runs] and their derivatives [batch, runs, coefficients]."""
        predicted, shares, scale = self._evaluate(theta)
        # A batched product per run: [runs, batch, terms] @ [runs, terms, coefficients].
        jacobian = np.matmul(shares.transpose(2, 0, 1), self.designs.transpose(1, 0, 2)).transpose(1, 0, 2)
        if self.outer_exponent:
            # d/dt of exp(t) · log Σ is the prediction itself.
            return predicted, np.concatenate([jacobian * scale[:, None, None], predicted[:, :, None]], axis=2)
        return predicted, jacobian

    def _evaluate(self, theta: Values) -> tuple[Values, Values, Values]:
        inner, scale = theta, np.ones(len(theta))
        if self.outer_exponent:
            inner, scale = theta[:, :-1], np.exp(np.clip(theta[:, -1], -20, 20))
        exponents = np.matmul(self.designs, inner.T).transpose(2, 0, 1)  # [batch, terms, runs]
        if self.offsets is not None:
            exponents = exponents + self.offsets
        largest = exponents.max(axis=1, keepdims=True)
        terms = np.exp(exponents - largest)
        total = terms.sum(axis=1, keepdims=True)
        predicted = (np.log(total) + largest)[:, 0] * scale[:, None]
        return predicted, terms / total, scale


def huber(residuals: Values, delta: float) -> Values:
    """Huber's loss of each residual: r²/2 up to `delta`, then linear."""
    size = np.abs(residuals)
    return np.where(size <= delta, 0.5 * residuals**2, delta * (size - 0.5 * delta))


def fit_batch(
    model: SumOfTerms, log_losses: Values, weights: Values, starts: Values, *, delta: float = HUBER_DELTA
) -> tuple[Values, Values]:
    """Minimise Σ weight · huber(residual) from each start: Levenberg and Marquardt on iteratively reweighted squares.

    Log losses are [runs] or [batch, runs], weights [batch, runs] and not negative, starts [batch, coefficients].
    Returns θ [batch, coefficients] and the minima [batch].
    """
    theta, cost = starts.copy(), np.full(len(starts), np.inf)
    rows = np.arange(len(starts))
    # For the rows that have not converged yet:
    log_losses, here = np.broadcast_to(log_losses, weights.shape), starts.copy()
    damping, idle = np.full(len(starts), 1e-2), np.zeros(len(starts), dtype=np.int64)
    predicted, jacobian = model.with_jacobian(here)
    residuals = predicted - log_losses
    lowest = (weights * huber(residuals, delta)).sum(1)
    for _ in range(_MOST_STEPS):
        effective = weights * np.minimum(1.0, delta / np.maximum(np.abs(residuals), 1e-300))
        weighted = (jacobian * effective[:, :, None]).transpose(0, 2, 1)
        gradient = np.matmul(weighted, residuals[:, :, None])
        curvature = np.matmul(weighted, jacobian)
        diagonal = np.einsum("bpp->bp", curvature)
        ridge = damping[:, None] * diagonal + 1e-12 * diagonal.max(1, keepdims=True) + 1e-30
        ridge = ridge[:, :, None] * np.eye(curvature.shape[1])
        step = np.clip(-np.linalg.solve(curvature + ridge, gradient)[:, :, 0], -_LONGEST_STEP, _LONGEST_STEP)
        predicted, new_jacobian = model.with_jacobian(here + step)
        new_residuals = predicted - log_losses
        new = (weights * huber(new_residuals, delta)).sum(1)
        # A step is taken where it lowers the cost.
        better = new < lowest
        gain = np.where(better, (lowest - new) / np.maximum(lowest, 1e-300), 0.0)
        here = np.where(better[:, None], here + step, here)
        residuals = np.where(better[:, None], new_residuals, residuals)
        jacobian = np.where(better[:, None, None], new_jacobian, jacobian)
        lowest = np.where(better, new, lowest)
        damping = np.clip(np.where(better, damping / 4, damping * 5), 1e-12, 1e9)
        idle = np.where(better & (gain < _SMALLEST_GAIN), idle + 1, np.where(better, 0, idle))
        theta[rows], cost[rows] = here, lowest
        settled = (idle >= 3) | (damping > 1e8) | (np.abs(step).max(1) < _SMALLEST_STEP)
        if settled.all():
            break
        if settled.any():
            left = ~settled
            rows, idle = rows[left], idle[left]
            # One by one: through a generator, the type checker takes half a minute for their types around the loop.
            weights = weights[left]
            log_losses = log_losses[left]
            here = here[left]
            residuals = residuals[left]
            jacobian = jacobian[left]
            lowest = lowest[left]
            damping = damping[left]
    return theta, cost


def polish(model: SumOfTerms, log_losses: Values, theta: Values, *, delta: float = HUBER_DELTA) -> Values:
    """The minimum near `theta` [coefficients], to about 10 digits, by BFGS with the exact gradient."""
    from scipy.optimize import minimize

    _, scaled = model.with_jacobian(theta[None])
    # Scaled so that each coefficient changes the predictions about equally.
    units = 1 / np.maximum(np.sqrt(np.einsum("bnp,bnp->p", scaled, scaled)), 1e-12)

    def objective(offset: Values) -> tuple[float, Values]:
        predicted, jacobian = model.with_jacobian((theta + offset * units)[None])
        residuals = predicted[0] - log_losses
        slope = np.clip(residuals, -delta, delta)
        return float(huber(residuals, delta).sum()) / delta, (slope @ jacobian[0]) * units / delta

    result = minimize(objective, np.zeros(len(theta)), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 2000})
    return theta + result.x * units


def fit(model: SumOfTerms, log_losses: Values, starts: Values, *, delta: float = HUBER_DELTA) -> Values:
    """θ [coefficients] with the smallest sum of Huber losses that any of the starts [batch, coefficients] leads to."""
    weights = np.ones((len(starts), len(log_losses)))
    theta, cost = fit_batch(model, log_losses, weights, starts, delta=delta)
    order = np.argsort(cost, kind="stable")
    # The objective has flat valleys and several minima: the best few are all followed to their end.
    polished = np.array([polish(model, log_losses, theta[index], delta=delta) for index in order[:3]])
    costs = huber(model.log_losses(polished) - log_losses, delta).sum(1)
    return polished[int(np.argmin(costs))]


Variable = Literal["parameters", "tokens", "compute"]

FIXED = {"one": 1.0}
"""Exponents that are not fitted."""


@dataclass(frozen=True)
class Term:
    """constant · variable^−exponent; without a variable the constant alone."""

    constant: str
    variable: Variable | None = None
    exponent: str | None = None


@dataclass(frozen=True)
class LawForm:
    """A law as a sum of terms, with its formula and its source."""

    name: str
    formula: str
    source: str
    terms: tuple[Term, ...]
    outer_exponent: str | None = None
    """The name of the whole sum's exponent, if it has one."""

    @property
    def exponents(self) -> tuple[str, ...]:
        """Names of the fitted exponents of variables, which all training sets share."""
        named = (term.exponent for term in self.terms if term.exponent)
        return tuple(dict.fromkeys(name for name in named if name not in FIXED))

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the constants, of which each training set has its own."""
        return tuple(term.constant for term in self.terms)

    @property
    def variables(self) -> tuple[Variable, ...]:
        return tuple(dict.fromkeys(term.variable for term in self.terms if term.variable))

    def n_coefficients(self, groups: int = 1) -> int:
        """The number of coefficients of a fit on that many training sets."""
        return len(self.exponents) + groups * len(self.constants) + (self.outer_exponent is not None)


_CHINCHILLA = (Term("A", "parameters", "alpha"), Term("B", "tokens", "beta"), Term("E"))

LAWS: dict[str, LawForm] = {
    form.name: form
    for form in (
        LawForm("chinchilla", "E + A/N^alpha + B/D^beta", "Hoffmann et al. 2022, approach 3", _CHINCHILLA),
        LawForm(
            "gadre",
            "E + A/N^alpha + B/D^alpha",
            "Gadre et al. 2024, which is E + (a·M^eta + b·M^-eta)·C^-eta with M = D/N",
            (Term("A", "parameters", "alpha"), Term("B", "tokens", "alpha"), Term("E")),
        ),
        LawForm(
            "kaplan",
            "(A/N^kappa + B/D)^alpha_D, kappa = alpha_N/alpha_D",
            "Kaplan et al. 2020, equation 1.5",
            (Term("A", "parameters", "kappa"), Term("B", "tokens", "one")),
            outer_exponent="alpha_D",
        ),
        LawForm(
            "kaplan-n",
            "E + A/N^alpha",
            "Kaplan et al. 2020, L(N), with a floor",
            (Term("A", "parameters", "alpha"), Term("E")),
        ),
        LawForm(
            "kaplan-d",
            "E + B/D^beta",
            "Kaplan et al. 2020, L(D), with a floor",
            (Term("B", "tokens", "beta"), Term("E")),
        ),
        LawForm(
            "kaplan-c",
            "E + K/C^gamma",
            "Kaplan et al. 2020, L(C), with a floor",
            (Term("K", "compute", "gamma"), Term("E")),
        ),
    )
}


def law_form(name: str) -> LawForm:
    """The law of this name. Raises NapkinError, with the nearest name, for another."""
    if name not in LAWS:
        near = near_names(name, LAWS)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(LAWS)}"
        raise NapkinError(f"there is no law '{name[:60]}': {hint}")
    return LAWS[name]


class LawModel:
    """A law's coefficients for some runs, as one vector θ.

    θ holds the exponents, then for each training set the logarithms of its constants at the geometric mean of the
    variables, then the logarithm of the outer exponent. Around the mean the coefficients hardly depend on one another,
    so that they are found in a few steps.
    """

    def __init__(self, form: LawForm, centres: dict[str, float], groups: Sequence[str]) -> None:
        self.form, self.centres, self.groups = form, centres, tuple(groups)
        self.exponents = list(form.exponents)
        self.n_linear = len(self.exponents) + len(self.groups) * len(form.constants)

    @classmethod
    def of(cls, form: LawForm, runs: Sequence[Observation]) -> "LawModel":
        centres = {name: float(np.mean(np.log(values_of(runs, name)))) for name in form.variables}
        return cls(form, centres, tuple(dict.fromkeys(run.group for run in runs)))

    def terms(self, variables: dict[str, Values], groups: Sequence[str]) -> SumOfTerms:
        """The designs for runs with these variables (not logarithms) and training sets."""
        runs, form = len(groups), self.form
        designs = np.zeros((len(form.terms), runs, self.n_linear))
        rows = np.arange(runs)
        group = np.array([self.groups.index(each) for each in groups], dtype=np.int64)
        fixed = np.zeros((len(form.terms), runs))
        for index, term in enumerate(form.terms):
            designs[index, rows, len(self.exponents) + group * len(form.constants) + index] = 1
            if term.variable and term.exponent:
                offset = np.log(variables[term.variable]) - self.centres[term.variable]
                if term.exponent in FIXED:
                    fixed[index] = -FIXED[term.exponent] * offset
                else:
                    designs[index, :, self.exponents.index(term.exponent)] = -offset
        return SumOfTerms(designs, outer_exponent=form.outer_exponent is not None, offsets=fixed)

    def coefficients(self, theta: Values, group: str) -> dict[str, Values]:
        """The law's own coefficients [batch] of one training set from θ [batch, coefficients]."""
        coefficients = {name: theta[:, index] for index, name in enumerate(self.exponents)}
        first = len(self.exponents) + self.groups.index(group) * len(self.form.constants)
        for index, term in enumerate(self.form.terms):
            log = theta[:, first + index]
            if term.variable and term.exponent:
                power = FIXED[term.exponent] if term.exponent in FIXED else coefficients[term.exponent]
                log = log + power * self.centres[term.variable]
            coefficients[term.constant] = np.exp(np.minimum(log, 700.0))
        if self.form.outer_exponent:
            coefficients[self.form.outer_exponent] = np.exp(theta[:, -1])
        return coefficients

    def starts(self, log_losses: Values) -> Values:
        """[batch, coefficients] from which a fit begins: a coarse grid, the same constants for all training sets."""
        level = float(np.mean(log_losses))
        if self.form.outer_exponent:
            grid = [
                [*[kappa] * len(self.exponents), *[level / outer - 0.7] * (2 * len(self.groups)), np.log(outer)]
                for kappa, outer in itertools.product((0.5, 0.8, 1.2), (0.05, 0.1, 0.3))
            ]
            return np.array(grid)
        powers = itertools.product(*[(0.15, 0.3, 0.6)] * len(self.exponents))
        # Shares of the loss at the centre: of each power, and of the floor.
        shares = itertools.product((0.15, 0.4), repeat=len(self.form.terms) - 1)
        grid = []
        for exponents, parts in itertools.product(list(powers), list(shares)):
            constants = [level + np.log(part) for part in parts] + [level + np.log(max(1 - sum(parts), 0.1))]
            grid.append([*exponents, *constants * len(self.groups)])
        return np.array(grid)


def values_of(runs: Sequence[Observation], variable: str) -> Values:
    """[runs] of parameters, tokens or compute."""
    return np.array([getattr(run, variable) for run in runs], dtype=np.float64)


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
