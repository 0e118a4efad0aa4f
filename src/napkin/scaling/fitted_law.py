"""A fitted law: coefficients and predictions with intervals, kept as a JSON file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from napkin.errors import NapkinError, first_line
from napkin.files import StrPath, atomic_write_bytes, read_bytes
from napkin.scaling.law_forms import LawForm, LawModel, Values, law_form
from napkin.scaling.observations import FLOPS_PER_PARAMETER_AND_TOKEN

LEVEL = 0.9
"""The probability of all intervals: they hold the true value, or a new run, in nine of ten cases."""

VERSION = 2
LARGEST_FILE = 64 * 2**20
_RESIDUALS = 40
"""Quantiles of the residuals that stand for their distribution in predictions."""
_GOLDEN = (5**0.5 - 1) / 2

Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e40)]


@dataclass(frozen=True)
class Interval:
    """An estimate and its 90% interval."""

    estimate: float
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def relative(self) -> float:
        """Half the width, as a share of the estimate."""
        return (self.high - self.low) / 2 / self.estimate


@dataclass(frozen=True)
class Optimum:
    """Parameters and tokens that give the lowest loss for some FLOPs."""

    flops: float
    parameters: Interval
    tokens: Interval
    loss: Interval
    """The loss of a run of that size; its interval includes the scatter of single runs."""


class LawFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The file of a law."""

    law: str
    groups: tuple[str, ...]
    centres: dict[str, Finite]
    theta: tuple[Finite, ...]
    draws: tuple[tuple[Finite, ...], ...]
    residuals: tuple[Finite, ...]
    runs: Annotated[int, msgspec.Meta(ge=1)]
    ranges: dict[str, tuple[Positive, Positive]]
    rates: tuple[Positive, ...] = ()
    """Equally likely errors of the law per factor of e in FLOPs beyond the runs."""
    version: int = VERSION


class FittedLaw:
    """A law with the coefficients that fit some runs best, and those of bootstrap draws."""

    def __init__(self, content: LawFile) -> None:
        self.content = content
        self.form: LawForm = law_form(content.law)
        self.model = LawModel(self.form, dict(content.centres), content.groups)
        self.theta = np.array(content.theta, dtype=np.float64)
        """[coefficients]"""
        self.draws = np.array(content.draws, dtype=np.float64).reshape(len(content.draws), len(content.theta))
        """[draws, coefficients]"""

    @property
    def groups(self) -> tuple[str, ...]:
        """The training sets of the runs; one without a name where the runs do not differ in it."""
        return tuple(self.content.groups)

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The least and the most parameters, tokens and compute of the runs."""
        return self.content.ranges

    @cached_property
    def coefficients(self) -> dict[str, dict[str, Interval]]:
        coefficients = {}
        for group in self.groups:
            point = self.model.coefficients(self.theta[None], group)
            drawn = self.model.coefficients(self.draws, group)
            coefficients[group] = {name: interval_of(float(point[name][0]), drawn[name]) for name in point}
        return coefficients

    def predict(
        self, parameters: float, tokens: float, *, flops: float | None = None, group: str | None = None
    ) -> Interval:
        """The loss of a new run, in nats per token.

        The interval holds how well the coefficients are known (bootstrap), how much single runs scatter about the law
        (residuals, without outliers), and how far the law itself errs beyond the runs (`discrepancy`), by rolling the
        origin over them.

        `flops` are those of the training, by default 6·N·D; only laws of compute use them. `group` is the training set,
        by default the only one. Raises NapkinError for a size that is not positive, or a training set that the law does
        not know.
        """
        compute = FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens if flops is None else flops
        sizes = {"parameters": parameters, "tokens": tokens, "compute": compute}
        for name, value in sizes.items():
            if not 0 < value < 1e40:
                raise NapkinError(f"{name} of {value:g} cannot be predicted for: use a number above 0")
        variables = {name: np.array([value]) for name, value in sizes.items()}
        group = self.group(group)
        return self._of_new_run(variables, group)

    def mean_loss(self, parameters: float, tokens: float, *, group: str | None = None) -> float:
        """The loss by the law's best coefficients alone."""
        return self.predict(parameters, tokens, group=group).estimate

    def optimum(
        self, flops: float, *, group: str | None = None, flops_per_token: Callable[[float], float] | None = None
    ) -> Optimum:
        """The best use of the FLOPs of a whole training.

        `flops_per_token` are those of a model with so many parameters, by default 6 per parameter. Raises NapkinError
        for a law that does not depend on both parameters and tokens.
        """
        if {*self.form.variables} != {"parameters", "tokens"}:
            raise NapkinError(
                f"the law '{self.form.name}' says nothing of parameters and tokens together: use --law chinchilla"
            )
        if not 1 <= flops <= 1e36:
            raise NapkinError(f"{flops:g} FLOPs have no optimum: use 1 to 1e36")
        per_token = flops_per_token or (lambda parameters: FLOPS_PER_PARAMETER_AND_TOKEN * parameters)
        group = self.group(group)
        thetas = np.concatenate([self.theta[None], self.draws])

        def losses_at(sizes: Values) -> Values:
            """The log loss of each θ at its own size, [thetas]."""
            tokens = flops / np.array([per_token(float(size)) for size in sizes])
            terms = self.model.terms({"parameters": sizes, "tokens": tokens}, [group] * len(sizes))
            # Run i belongs to θ i.
            exponents = np.einsum("knp,np->kn", terms.designs, thetas[:, : self.model.n_linear])
            if terms.offsets is not None:
                exponents = exponents + terms.offsets
            inner = np.logaddexp.reduce(exponents, axis=0)
            return inner * (np.exp(thetas[:, -1]) if terms.outer_exponent else 1.0)

        sizes = _best_sizes(losses_at, len(thetas), flops)
        tokens = np.array([flops / per_token(float(size)) for size in sizes])
        best = {"parameters": sizes[:1], "tokens": tokens[:1], "compute": np.array([flops])}
        return Optimum(
            flops=flops,
            parameters=interval_of(float(sizes[0]), sizes[1:]),
            tokens=interval_of(float(tokens[0]), tokens[1:]),
            loss=self._of_new_run(best, group),
        )

    def optima(self, budgets: Sequence[float], *, group: str | None = None) -> list[Optimum]:
        """The best use of each budget in FLOPs; none by a law that does not depend on both parameters and tokens."""
        if {*self.form.variables} != {"parameters", "tokens"}:
            return []
        return [self.optimum(flops, group=group) for flops in budgets]

    def extrapolation(self, flops: float) -> float:
        """These FLOPs as a multiple of those of the largest run."""
        return flops / self.ranges["compute"][1]

    @property
    def rate(self) -> Interval:
        """The law's own error per factor of e in FLOPs beyond its runs, as a standard deviation; 90% interval."""
        rates = np.array(self.content.rates)
        return interval_of(float(np.median(rates)), rates)

    def discrepancy(self, flops: float) -> Values:
        """Equally likely standard deviations of the law's own error for a run of so many FLOPs: 0 up to those of the
        largest run, then ρ · log(FLOPs / those of the largest)."""
        return max(0.0, float(np.log(self.extrapolation(flops)))) * np.array(self.content.rates)

    def group(self, name: str | None) -> str:
        """The training set of this name. Raises NapkinError, naming those there are, for another."""
        if name is None:
            if len(self.groups) > 1:
                raise NapkinError(f"the law has {len(self.groups)} training sets: name one of {', '.join(self.groups)}")
            return next(iter(self.groups))
        if name not in self.groups:
            known = ", ".join(each for each in self.groups if each) or "no training sets"
            raise NapkinError(f"the law does not know the training set '{name[:60]}': it has {known}")
        return name

    def write(self, path: StrPath, *, overwrite: bool = False) -> None:
        """Write the law as JSON, atomically."""
        atomic_write_bytes(path, msgspec.json.format(msgspec.json.encode(self.content), indent=1), overwrite=overwrite)

    def _of_new_run(self, variables: dict[str, Values], group: str) -> Interval:
        terms = self.model.terms(variables, [group])
        point, drawn = terms.log_losses(self.theta[None])[0, 0], terms.log_losses(self.draws)[:, 0]
        beyond = self.discrepancy(float(variables["compute"][0]))
        return interval_of_new_run(float(point), drawn, np.array(self.content.residuals), beyond)


def read_law(path: str | Path) -> FittedLaw:
    """Read a law that `FittedLaw.write` wrote. Raises NapkinError, naming the file, for anything else."""
    path = Path(path)
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        raise NapkinError(f"'{path}' does not exist: write a law with `napkin law fit ... --out {path}`") from None
    if len(data) > LARGEST_FILE:
        raise NapkinError(f"'{path}' has {len(data):,} bytes: a law has at most {LARGEST_FILE:,}")
    try:
        content = msgspec.json.decode(data, type=LawFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NapkinError(f"'{path}' is not a law of `napkin law fit` ({first_line(error)})") from None
    if content.version != VERSION:
        raise NapkinError(f"'{path}' is a law of version {content.version}, this napkin reads {VERSION}: fit it again")
    form = law_form(content.law)
    expected = form.n_coefficients(len(content.groups))
    if (
        len(content.theta) != expected
        or not content.draws
        or not content.residuals
        or not content.rates
        or any(len(draw) != expected for draw in content.draws)
        or not set(form.variables) <= content.centres.keys()
        or not {"parameters", "tokens", "compute"} <= content.ranges.keys()
    ):
        raise NapkinError(f"'{path}' does not hold the coefficients of the law '{content.law}': fit it again")
    return FittedLaw(content)


def quantile_shares() -> Values:
    """The quantiles of residuals that stand for their distribution in a law's file."""
    return (np.arange(_RESIDUALS) + 0.5) / _RESIDUALS


def interval_of(estimate: float, drawn: Values) -> Interval:
    """An estimate with the 90% interval of its draws."""
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(estimate, float(min(low, estimate)), float(max(high, estimate)))


def interval_of_new_run(point: float, drawn: Values, residuals: Values, discrepancy: Values) -> Interval:
    """The interval of the loss of a run whose log is predicted as `point`.

    Its error has three independent parts: that of the coefficients, as the draws spread, the scatter of single runs,
    and the law's own, normal with one of the equally likely deviations `discrepancy`.
    """
    from scipy.special import ndtr

    known = np.hypot(_deviation(drawn), _deviation(residuals))
    deviations = np.maximum(np.hypot(known, discrepancy), 1e-12)
    low, high = 0.0, 10 * float(deviations.max())
    for _ in range(60):
        half = (low + high) / 2
        low, high = (half, high) if np.mean(2 * ndtr(half / deviations) - 1) < LEVEL else (low, half)
    return Interval(*(float(np.exp(each)) for each in (point, point - high, point + high)))


def _deviation(values: Values) -> float:
    """The standard deviation of a normal distribution that spreads as the middle nine tenths of the values."""
    from scipy.special import ndtri

    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float((high - low) / (2 * ndtri((1 + LEVEL) / 2)))


def _best_sizes(losses: Callable[[Values], Values], batch: int, flops: float) -> Values:
    """[batch] sizes of lowest loss, by golden sections over their logarithm, all at a time."""
    low, high = np.zeros(batch), np.full(batch, np.log(flops))
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = losses(np.exp(left)), losses(np.exp(right))
    for _ in range(90):
        to_left = at_left < at_right
        low, high = np.where(to_left, low, left), np.where(to_left, right, high)
        new = np.where(to_left, high - _GOLDEN * (high - low), low + _GOLDEN * (high - low))
        at_new = losses(np.exp(new))
        left, right, at_left, at_right = (
            np.where(to_left, new, right),
            np.where(to_left, left, new),
            np.where(to_left, at_new, at_right),
            np.where(to_left, at_left, at_new),
        )
    return np.exp((low + high) / 2)
