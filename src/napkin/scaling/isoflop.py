"""Chinchilla's approaches 1 and 2: the best size for a budget read off the runs themselves (Hoffmann et al. 2022).

Approach 1 takes the runs that no run with as little compute beats, approach 2 the minimum of a parabola through the
runs of each budget, loss over log size. Both then fit a power law to the best sizes over FLOPs.

The losses of these best runs have a law of their own, E + K/C^gamma. It does not predict other sizes. On IsoFLOP curves
with many sizes it is more accurate at the best size than a law of all runs: the minimum of a parabola has the scatter
of several runs averaged, and no run far from the optimum bends it.

Approach 2 is biased: the loss over log size is no parabola, as its two sides fall with different exponents, and its
minimum moves with how far the sizes reach to either side. `approach_2_bias` measures that on losses without noise.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from napkin.errors import NapkinError
from napkin.scaling.fitted_law import FittedLaw, Interval
from napkin.scaling.law_fit import PowerLaw, fit_law, fit_power_law
from napkin.scaling.law_forms import Values
from napkin.scaling.observations import FLOPS_PER_PARAMETER_AND_TOKEN, Observation

SAME_BUDGET = 0.05
"""Runs whose FLOPs differ by at most this share from the next smaller one have one budget."""
FEWEST_SIZES = 4
"""Fewest sizes of a budget that gets a parabola."""


@dataclass(frozen=True)
class BestSize:
    """The best size for a budget."""

    flops: float
    parameters: float
    tokens: float
    loss: float
    runs: int
    at_edge: bool = False
    """True if the minimum is outside the sizes that were run: then it is left out of the power law."""


@dataclass(frozen=True)
class SizeLaw:
    """The best sizes, and power laws through them."""

    approach: int
    best: tuple[BestSize, ...]
    parameters: PowerLaw
    """The best size as a power law of FLOPs."""
    tokens: PowerLaw
    notes: tuple[str, ...] = ()
    loss: FittedLaw | None = None
    """E + K/C^gamma through the best losses; None where there are too few."""

    def best_loss(self, flops: float) -> Interval | None:
        """The loss of the best size for a budget, with its 90% interval."""
        if self.loss is None:
            return None
        parameters, tokens = (each.estimate for each in self.optimum(flops))
        return self.loss.predict(parameters, tokens, flops=flops)

    def optimum(self, flops: float) -> tuple[Interval, Interval]:
        """Parameters and tokens for a budget, with 90% intervals of the power laws. They know nothing of a bias."""
        return self.parameters.predict(flops=flops), self.tokens.predict(flops=flops)

    def as_values(self, budgets: Sequence[float] = ()) -> dict[str, Any]:
        """The law for programs, with the optima of some budgets in FLOPs."""
        laws = {"parameters": self.parameters, "tokens": self.tokens}
        return {
            "approach": self.approach,
            "best": [asdict(each) for each in self.best],
            "exponents": {name: asdict(law.exponents["flops"]) for name, law in laws.items()},
            "notes": list(self.notes),
            "optima": [
                {
                    "flops": flops,
                    **{name: asdict(law.predict(flops=flops)) for name, law in laws.items()},
                    "loss": None if (loss := self.best_loss(flops)) is None else asdict(loss),
                }
                for flops in budgets
            ],
        }


def approach_1(runs: Sequence[Observation]) -> SizeLaw:
    """The power law through the runs that no run of at most their FLOPs beats.

    Raises NapkinError where fewer than three such runs are left.
    """
    best: list[BestSize] = []
    lowest = np.inf
    for budget in runs_by_budget(runs):
        run = min(budget, key=lambda each: each.loss)
        if run.loss < lowest:
            lowest = run.loss
            best.append(BestSize(run.compute, run.parameters, run.tokens, run.loss, len(budget)))
    return _size_law(1, best)


def approach_2(runs: Sequence[Observation]) -> SizeLaw:
    """The power law through the minima of parabolas, one for each budget with four sizes or more.

    Raises NapkinError where fewer than three budgets have a minimum among their sizes.
    """
    best: list[BestSize] = []
    for budget in runs_by_budget(runs):
        if len({run.parameters for run in budget}) < FEWEST_SIZES:
            continue
        sizes = np.log([run.parameters for run in budget])
        minimum = parabola_minimum(sizes, np.array([run.loss for run in budget]))
        if minimum is not None:
            at, loss, outside = minimum
            flops = float(np.exp(np.mean(np.log([run.compute for run in budget]))))
            parameters = float(np.exp(np.clip(at, -700, 700)))
            tokens = flops / (FLOPS_PER_PARAMETER_AND_TOKEN * parameters)
            best.append(BestSize(flops, parameters, tokens, loss, len(budget), outside))
    return _size_law(2, best)


@dataclass(frozen=True)
class Bias:
    """The error of approach 2 on losses without noise of a known law, at the sizes and budgets of some runs."""

    flops: float
    true_parameters: float
    found_parameters: float
    true_exponent: float
    """d log N / d log C of the law's optimum between the smallest budget and `flops`."""
    found_exponent: float

    @property
    def relative(self) -> float:
        return self.found_parameters / self.true_parameters - 1

    def as_values(self) -> dict[str, float]:
        return {**asdict(self), "relative": self.relative}


def approach_2_bias(runs: Sequence[Observation], law: FittedLaw, flops: float, *, group: str | None = None) -> Bias:
    """The error of approach 2 for a budget, had the runs followed the law without noise."""
    exact = [
        replace(run, loss=law.predict(run.parameters, run.tokens, flops=run.flops, group=group).estimate)
        for run in runs
    ]
    fitted = approach_2(exact)
    least = min(each.flops for each in fitted.best)
    low, high = law.optimum(least, group=group), law.optimum(flops, group=group)
    slope = np.log(high.parameters.estimate / low.parameters.estimate) / np.log(flops / least)
    return Bias(
        flops,
        high.parameters.estimate,
        fitted.optimum(flops)[0].estimate,
        float(slope),
        fitted.parameters.exponents["flops"].estimate,
    )


def parabola_minimum(positions: Values, losses: Values) -> tuple[float, float, bool] | None:
    """The position (a logarithm) where the parabola through the losses is lowest, its value, and whether it is
    outside the positions; None where it opens downwards."""
    centre, square, slope, level = parabola(positions, losses)
    if square <= 0:
        return None
    at = -slope / (2 * square)
    outside = not positions.min() - centre <= at <= positions.max() - centre
    return centre + at, level + slope * at + square * at**2, bool(outside)


def parabola(positions: Values, losses: Values) -> tuple[float, float, float, float]:
    """The parabola of least squares, a·(x - centre)² + b·(x - centre) + c: its centre, a, b and c."""
    centre = float(positions.mean())
    square, slope, level = np.polyfit(positions - centre, losses, 2)
    return centre, float(square), float(slope), float(level)


def runs_by_budget(runs: Sequence[Observation]) -> list[list[Observation]]:
    """The runs of each budget, the smallest budget first: those of FLOPs within `SAME_BUDGET` of the next."""
    budgets: list[list[Observation]] = []
    for run in sorted(runs, key=lambda each: each.compute):
        if budgets and run.compute <= budgets[-1][-1].compute * (1 + SAME_BUDGET):
            budgets[-1].append(run)
        else:
            budgets.append([run])
    return budgets


def _size_law(approach: int, best: Sequence[BestSize]) -> SizeLaw:
    inside = [each for each in best if not each.at_edge]
    if len(inside) < 3:
        minimum = f"budgets with a minimum among {FEWEST_SIZES} sizes or more"
        what = "runs on the lower envelope" if approach == 1 else minimum
        raise NapkinError(
            f"approach {approach} needs 3 {what}, there are {len(inside)}: run more sizes per budget, "
            "or use --approach 3"
        )
    flops = [each.flops for each in inside]
    minima = [Observation(each.parameters, each.tokens, each.loss, flops=each.flops) for each in inside]
    loss = None
    with contextlib.suppress(NapkinError):
        loss = fit_law(minima, "kaplan-c").law
    notes = tuple(
        f"the minimum at {each.flops:.3g} FLOPs is outside the sizes that were run, and left out"
        for each in best
        if each.at_edge
    )
    return SizeLaw(
        approach,
        tuple(best),
        fit_power_law([each.parameters for each in inside], flops=flops),
        fit_power_law([each.tokens for each in inside], flops=flops),
        notes,
        loss,
    )
