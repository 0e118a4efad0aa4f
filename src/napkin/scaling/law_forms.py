"""The laws that can be fitted: each a sum of powers of parameters N, tokens D or FLOPs C, with their sources."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from napkin.errors import NapkinError
from napkin.near_names import near_names
from napkin.scaling.observations import Observation
from napkin.scaling.robust_fit import SumOfTerms, Values

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
    """One law."""

    name: str
    formula: str
    source: str
    terms: tuple[Term, ...]
    outer_exponent: str | None = None
    """Of the whole sum."""

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
        """What the law depends on."""
        return tuple(dict.fromkeys(term.variable for term in self.terms if term.variable))

    def n_coefficients(self, groups: int = 1) -> int:
        """How many numbers a fit on so many training sets finds."""
        return len(self.exponents) + groups * len(self.constants) + (self.outer_exponent is not None)


_CHINCHILLA = (
    Term("A", "parameters", "alpha"),
    Term("B", "tokens", "beta"),
    Term("E"),
)

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
        """The model for these runs."""
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
        found = {name: theta[:, index] for index, name in enumerate(self.exponents)}
        first = len(self.exponents) + self.groups.index(group) * len(self.form.constants)
        for index, term in enumerate(self.form.terms):
            log = theta[:, first + index]
            if term.variable and term.exponent:
                power = FIXED[term.exponent] if term.exponent in FIXED else found[term.exponent]
                log = log + power * self.centres[term.variable]
            found[term.constant] = np.exp(np.minimum(log, 700.0))
        if self.form.outer_exponent:
            found[self.form.outer_exponent] = np.exp(theta[:, -1])
        return found

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
