"""The transfer test of µP: whether the best learning rate stays where it is as the model grows wider.

Yang et al. 2022 (Tensor Programs V), figure 1. Models of several widths are trained at several learning rates, each an
ordinary run of a sweep; the best rate of a width is the vertex of the parabola through the lowest loss and its
neighbours, over the logarithm of the rate.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from napkin.errors import NapkinError
from napkin.recipe.recipe import Recipe
from napkin.scaling.axis import Value
from napkin.scaling.best_run import Standing
from napkin.scaling.trials import Trial

FARTHEST = 2.0
"""The best rates of all widths are to be within this factor of each other."""


@dataclass(frozen=True)
class BestRate:
    """The learning rate at which a width learns most."""

    width: int
    rate: float
    """Of the vertex; where the lowest loss is at the edge of what was tried, its own."""
    loss: float
    """The lowest of the runs."""
    is_bracketed: bool
    """Whether runs of lower and of higher rate have a higher loss."""


@dataclass(frozen=True)
class Transfer:
    """The best rates of several widths."""

    best: tuple[BestRate, ...]

    @property
    def factor(self) -> float:
        """The largest of the best rates over the smallest."""
        rates = [each.rate for each in self.best]
        return max(rates) / min(rates)

    @property
    def holds(self) -> bool | None:
        """Whether they are within `FARTHEST`; None where a best rate is not bracketed, and may lie farther out."""
        if not all(each.is_bracketed for each in self.best):
            return None
        return self.factor <= FARTHEST


def widened(base: Recipe, width: int, *, mup: bool = True) -> Recipe:
    """The recipe at another width: heads as wide as before, d_ff in proportion, µP's multipliers from the base's width.

    Raises NapkinError where heads do not divide the width.
    """
    model, head_dim = base.model, base.model.resolved_head_dim
    heads, rest = divmod(width, head_dim)
    if rest or not heads:
        raise NapkinError(
            f"a width of {width} is no multiple of head_dim {head_dim}: use {head_dim}, {2 * head_dim}, …"
        )
    shrunk = model.n_heads // model.resolved_n_kv_heads
    if heads % shrunk:
        raise NapkinError(
            f"a width of {width} has {heads} heads, which {shrunk} queries per key do not divide: use multiples of "
            f"{shrunk * head_dim}"
        )
    return dataclasses.replace(
        base,
        model=dataclasses.replace(
            model,
            d_model=width,
            n_heads=heads,
            n_kv_heads=None if shrunk == 1 else heads // shrunk,
            head_dim=None if model.head_dim is None else head_dim,
            d_ff=None if model.d_ff is None else round(width * model.d_ff / model.d_model),
            mup_base_d_model=(model.mup_base_d_model or model.d_model) if mup else None,
        ),
    )


def transfer_trials(
    base: Recipe, widths: Sequence[int], rates: Sequence[float], *, mup: bool = True
) -> tuple[Trial, ...]:
    """A run for each width and learning rate.

    Raises NapkinError for fewer than two widths or three rates, for one that is given twice, and for one that no recipe
    can have.
    """
    for given, least, what in ((widths, 2, "widths"), (rates, 3, "learning rates")):
        if len(set(given)) < least:
            raise NapkinError(f"a transfer test needs {least} {what}, {len(set(given))} are given: give more")
        if len(set(given)) < len(given):
            raise NapkinError(f"one of the {what} is given twice: give each once")
    trials = []
    for width in sorted(widths):
        wide = widened(base, width, mup=mup)
        for rate in sorted(rates):
            optimizer = dataclasses.replace(wide.optimizer, learning_rate=rate)
            values: dict[str, Value] = {"model.d_model": width, "optimizer.learning_rate": rate}
            name = f"d_model={width},learning_rate={rate:.6g}"
            trials.append(Trial(name, values, dataclasses.replace(wide, optimizer=optimizer)))
    return tuple(trials)


def curves(standings: Sequence[Standing]) -> dict[int, list[tuple[float, float]]]:
    """(learning rate, loss) of the runs that are at their end with a finite loss, by width."""
    found: dict[int, list[tuple[float, float]]] = {}
    for each in standings:
        recipe = each.trial.recipe
        points, rate = found.setdefault(recipe.model.d_model, []), recipe.optimizer.learning_rate
        assert rate is not None
        if each.loss is not None and math.isfinite(each.loss):
            points.append((rate, each.loss))
    return {width: sorted(points) for width, points in found.items()}


def transfer(by_width: dict[int, list[tuple[float, float]]]) -> Transfer:
    """The best rate of each width from its (learning rate, loss). Raises NapkinError for a width without a loss."""
    missing = [str(width) for width, points in by_width.items() if not points]
    if missing:
        raise NapkinError(f"no run of width {', '.join(missing)} is at its end with a finite loss: use lower rates")
    return Transfer(tuple(_best(width, sorted(points)) for width, points in sorted(by_width.items())))


def _best(width: int, points: list[tuple[float, float]]) -> BestRate:
    rates, losses = zip(*points, strict=True)
    lowest = int(np.argmin(losses))
    if not 0 < lowest < len(points) - 1:
        return BestRate(width, rates[lowest], losses[lowest], is_bracketed=False)
    near = slice(lowest - 1, lowest + 2)
    logarithms = np.log(rates[near])
    curvature, slope, _ = np.polyfit(logarithms - logarithms[1], losses[near], 2)
    return BestRate(width, rates[lowest] * math.exp(-slope / (2 * curvature)), losses[lowest], is_bracketed=True)
