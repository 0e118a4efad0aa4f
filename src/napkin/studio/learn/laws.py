"""Scaling laws on Chinchilla's runs: the best size of each budget, and what a law of small runs says of larger ones."""

import functools
import math
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from napkin.scaling.isoflop import FEWEST_SIZES, SizeLaw, approach_2, parabola, runs_by_budget
from napkin.scaling.law_fit import LawFit, fit_law
from napkin.scaling.observations import EXAMPLE, Observation, drop_highest, read_observations
from napkin.studio.learn.idea import Idea

CURVE_POINTS = 40
BUDGET_POINTS = 20
LARGEST_BUDGET = 1e27
"""FLOPs to which the best loss of a law is drawn."""
MOST_DROPPED = 20


class IsoFlopRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The runs of the example that the law is fitted to, and the budget that it is asked about."""

    drop_highest: Annotated[int, msgspec.Meta(ge=0, le=MOST_DROPPED)] = 5
    """Number of runs with the highest loss to leave out."""
    largest: Annotated[float, msgspec.Meta(ge=1e17, le=1e25)] = 1e22
    """FLOPs of the largest runs that count."""
    flops: Annotated[float, msgspec.Meta(ge=1e18, le=LARGEST_BUDGET)] = 5.76e23
    """The budget; that of Chinchilla at first."""


@functools.cache
def _example() -> tuple[Observation, ...]:
    return read_observations(EXAMPLE).runs


def _runs(most_dropped: int, largest: float) -> tuple[list[Observation], list[Observation]]:
    """The runs up to a size, and the larger ones."""
    kept, _ = drop_highest(_example(), most_dropped)
    return [run for run in kept if run.compute <= largest], [run for run in kept if run.compute > largest]


@functools.lru_cache(maxsize=64)
def _size_law(most_dropped: int, largest: float) -> SizeLaw:
    return approach_2(_runs(most_dropped, largest)[0])


def isoflop_answer(asked: IsoFlopRequest) -> dict[str, Any]:
    """The runs of each budget with their parabola and its minimum, and the best size for a budget by the power law
    through the minima.

    Raises NapkinError where fewer than three budgets have a minimum.
    """
    law = _size_law(asked.drop_highest, asked.largest)
    budgets = []
    for runs in runs_by_budget(_runs(asked.drop_highest, asked.largest)[0]):
        if len({run.parameters for run in runs}) < FEWEST_SIZES:
            continue
        sizes, losses = (np.array([getattr(run, name) for run in runs]) for name in ("parameters", "loss"))
        centre, square, slope, level = parabola(np.log(sizes), losses)
        places = np.linspace(np.log(sizes.min()), np.log(sizes.max()), CURVE_POINTS) - centre
        budgets.append(
            {
                "flops": math.exp(float(np.mean(np.log([run.compute for run in runs])))),
                "runs": [[run.parameters, run.loss] for run in runs],
                "curve": [[math.exp(at + centre), square * at**2 + slope * at + level] for at in places.tolist()],
            }
        )
    parameters, tokens = law.optimum(asked.flops)
    smallest = min(each.flops for each in law.best)
    line = []
    for flops in np.geomspace(smallest, max(asked.flops, smallest), BUDGET_POINTS).tolist():
        size, _ = law.optimum(flops)
        line.append([flops, size.estimate, size.low, size.high])
    loss = law.best_loss(asked.flops)
    return {
        "budgets": budgets,
        "best": [asdict(each) for each in law.best],
        "line": line,
        "exponents": {
            name: asdict(each.exponents["flops"])
            for name, each in (("parameters", law.parameters), ("tokens", law.tokens))
        },
        "parameters": asdict(parameters),
        "tokens": asdict(tokens),
        "loss": None if loss is None else asdict(loss),
    }


ISOFLOP = Idea(
    name="isoflop",
    title="IsoFLOP curves",
    summary="Chinchilla's runs by budget: a parabola for each, its best size, and the size that a larger budget wants.",
    text=(
        "With a fixed number of FLOPs, a larger model sees fewer tokens. Too small and it cannot learn more, too large "
        "and it has not seen enough: between them is a size of least loss. Each curve is one budget, runs of different "
        "sizes with a parabola through them.",
        "The best sizes lie on a line in logarithms: parameters and tokens both grow with about the square root of the "
        "FLOPs, so about 20 tokens per parameter whatever the budget. The line is then followed to budgets that nobody "
        "has run; its interval says how far it can be trusted.",
    ),
    formula="FLOPs C = 6·N·D;  best N = a · C^α,  best D = b · C^β,  α + β = 1\n"
    "each budget: loss = c0 + c1·log N + c2·(log N)²",
    command="napkin law fit sizes example --flops 5.76e23",
    files=("scaling/isoflop.py", "scaling/law_fit.py"),
    request=IsoFlopRequest,
    answer=isoflop_answer,
)


class LawRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The runs that a law is fitted to, and the budget that is asked about."""

    law: Literal["chinchilla", "gadre", "kaplan"] = "chinchilla"
    drop_highest: Annotated[int, msgspec.Meta(ge=0, le=MOST_DROPPED)] = 5
    largest: Annotated[float, msgspec.Meta(ge=1e17, le=1e25)] = 1e20
    """FLOPs of the largest runs that the law sees."""
    flops: Annotated[float, msgspec.Meta(ge=1e18, le=LARGEST_BUDGET)] = 5.76e23


@functools.lru_cache(maxsize=64)
def _law(name: str, most_dropped: int, largest: float) -> LawFit:
    return fit_law(_runs(most_dropped, largest)[0], name)


@functools.lru_cache(maxsize=64)
def _best_losses(name: str, most_dropped: int, largest: float) -> list[list[float]]:
    """[FLOPs, loss, low, high] of the best use of budgets, from the smallest run's on."""
    over = np.geomspace(min(run.compute for run in _example()), LARGEST_BUDGET, BUDGET_POINTS).tolist()
    optima = _law(name, most_dropped, largest).law.optima(over)
    return [[each.flops, each.loss.estimate, each.loss.low, each.loss.high] for each in optima]


def law_answer(asked: LawRequest) -> dict[str, Any]:
    """The law's coefficients and its best loss over budgets with 90% intervals, and whether the larger runs, which it
    has not seen, are inside of theirs.

    Raises NapkinError for too few runs.
    """
    fitted = _law(asked.law, asked.drop_highest, asked.largest)
    _, later = _runs(asked.drop_highest, asked.largest)
    law = fitted.law
    predicted = [law.predict(run.parameters, run.tokens, flops=run.flops) for run in later]
    inside = sum(run.loss in interval for run, interval in zip(later, predicted, strict=True))
    optimum = law.optimum(asked.flops)
    return {
        "formula": law.form.formula,
        "coefficients": {name: asdict(each) for name, each in law.coefficients[law.groups[0]].items()},
        "seen": [[run.compute, run.loss] for run in fitted.runs],
        "later": [
            [run.compute, run.loss, interval.estimate, interval.low, interval.high]
            for run, interval in zip(later, predicted, strict=True)
        ],
        "inside": inside,
        "best": _best_losses(asked.law, asked.drop_highest, asked.largest),
        "optimum": {name: asdict(getattr(optimum, name)) for name in ("parameters", "tokens", "loss")},
        "extrapolation": law.extrapolation(asked.flops),
    }


LAW = Idea(
    name="scaling-law",
    title="A scaling law with its interval",
    summary="A law of small runs predicts larger ones, and says how sure it is: hide runs and see if it was right.",
    text=(
        "The loss of a run falls with its parameters and its tokens, towards a floor that no size goes below. Three "
        "terms with five coefficients describe hundreds of runs. They are fitted to runs that are cheap and then asked "
        "about one that is not.",
        "A prediction without an interval is a guess. The interval holds how well the coefficients are known, how much "
        "single runs scatter, and how far the law itself has erred when it was fitted to smaller runs and asked about "
        "larger ones. Hide the larger runs and see how many of them are inside.",
    ),
    formula="chinchilla: loss = E + A / N^α + B / D^β\nbest N for C FLOPs: N ∝ C^(β / (α + β))",
    command="napkin law fit example --drop-highest 5 --flops 5.76e23",
    files=("scaling/law_fit.py", "scaling/fitted_law.py", "scaling/rolling_origin.py"),
    request=LawRequest,
    answer=law_answer,
)
