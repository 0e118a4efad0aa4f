"""Votes between pairs of models: strengths by Bradley and Terry's model, Elo ratings, win rates and the position bias
of a judge.

Bradley and Terry (1952) give each model a strength b, and say that i wins against j with probability

    1 / (1 + exp(b_j - b_i))

The strengths are those of the highest likelihood, found by Newton's method; ties are half a win for each. Their
covariance is the inverse of the Fisher information, in which the strengths sum to 0. On Elo's scale 400 points are a
factor of 10 in odds: a rating is 1000 + 400 / ln(10) · b. Elo's own ratings (1978) are updated vote by vote, by
K · (result - expected), and depend on the order of the votes: they are the mean over random orders.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from napkin.errors import NapkinError, first_line
from napkin.evaluation.uncertainty import Estimate, mean_estimate, numbered_groups
from napkin.files import StrPath, read_bounded

ELO_SCALE = 400 / math.log(10)
ELO_START = 1000.0
_MOST_BYTES = 2**30
_MOST_NEWTON = 100

Winner = Literal["a", "b", "tie"]


@dataclass(frozen=True)
class Vote:
    """One judgement of two answers; `a` was shown first."""

    a: str
    b: str
    winner: Winner
    item: str = ""
    """The question; votes on one question are not independent. Empty is a question of its own."""

    @property
    def result(self) -> float:
        """1 where `a` won, 0 where `b` did, 0.5 for a tie."""
        return {"a": 1.0, "b": 0.0, "tie": 0.5}[self.winner]


def read_votes(path: StrPath) -> list[Vote]:
    """Read votes: JSONL of a, b, winner, which is a, b, tie or the name of one of the two, and item if there is one.

    Raises NapkinError for a line that is not a vote.
    """
    votes = []
    lines = read_bounded(path, _MOST_BYTES, what="a file of votes").decode("utf-8-sig", "replace").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            votes.append(_vote(json.loads(line)))
        except (ValueError, RecursionError, NapkinError) as error:
            raise NapkinError(f"'{path}' line {number} is not a vote ({first_line(error)}): correct it") from None
    if not votes:
        raise NapkinError(f"'{path}' has no vote: give a line for each, with a, b and winner")
    return votes


def _vote(row: Any) -> Vote:
    if not isinstance(row, dict):
        raise NapkinError("it is not a JSON object")
    names = [row.get(side) for side in ("a", "b")]
    if not all(isinstance(name, str) and name for name in names) or names[0] == names[1]:
        raise NapkinError("a and b are not the names of two models")
    named = row.get("winner")
    winner: Winner | None = "a" if named == names[0] else "b" if named == names[1] else None
    for each in get_args(Winner):
        winner = each if winner is None and named == each else winner
    if winner is None:
        raise NapkinError(f"winner is {str(named)[:40]!r}: use a, b, tie, or the name of one of the two")
    return Vote(str(names[0]), str(names[1]), winner, str(row.get("item", "")))


@dataclass(frozen=True)
class Rating:
    """A model's strength by its votes."""

    model: str
    rating: float
    """Bradley and Terry's strength on Elo's scale; the mean of all models is 1000."""
    standard_error: float
    low: float
    """Lower end of the interval of 95%, of the difference from the mean of all models."""
    high: float
    elo: float
    """The mean of Elo's ratings over random orders of the votes."""
    votes: int
    wins: float
    """Won votes, ties as halves."""


@dataclass(frozen=True)
class Ratings:
    """Ratings of all models, the best one first."""

    models: list[Rating]
    covariance: list[list[float]]
    """The covariance of the ratings, in the order of `models`."""
    intervals: str
    """How intervals were computed: Fisher information or the bootstrap."""

    def difference(self, first: str, second: str) -> tuple[float, float]:
        """The rating of the first less that of the second, and its standard error."""
        names = [each.model for each in self.models]
        i, j = names.index(first), names.index(second)
        variance = self.covariance[i][i] + self.covariance[j][j] - 2 * self.covariance[i][j]
        return self.models[i].rating - self.models[j].rating, math.sqrt(max(0.0, variance))


def ratings_of(
    votes: Sequence[Vote], *, bootstrap: int = 0, orders: int = 100, k_factor: float = 4.0, seed: int = 0
) -> Ratings:
    """Rate models by votes between them.

    Intervals are those of the Fisher information, in which all votes are independent; with `bootstrap` they are the
    middle 95% of so many samples of items with replacement. Raises NapkinError where the strengths are not finite:
    where some models have never lost against all others, or were never compared with them.
    """
    names = sorted({name for vote in votes for name in (vote.a, vote.b)})
    place = {name: number for number, name in enumerate(names)}
    pairs = np.array([(place[vote.a], place[vote.b]) for vote in votes], dtype=np.int64)
    results = np.array([vote.result for vote in votes])
    wins = _wins(pairs, results, len(names))
    _refuse_infinite(wins, names)
    strengths, covariance = bradley_terry(wins)
    centre = ELO_START + ELO_SCALE * strengths
    covariance = ELO_SCALE**2 * covariance
    errors = np.sqrt(np.diag(covariance))
    low, high = centre - 1.96 * errors, centre + 1.96 * errors
    random = np.random.default_rng(seed)
    if bootstrap:
        drawn = _bootstrapped(votes, pairs, results, len(names), bootstrap, random)
        covariance = np.cov(drawn, rowvar=False)
        errors = drawn.std(axis=0, ddof=1)
        low, high = np.quantile(drawn, (0.025, 0.975), axis=0)
    elo = _mean_elo(pairs, results, len(names), orders, k_factor, random)
    order = np.argsort(-centre, kind="stable")
    models = [
        Rating(
            names[at],
            float(centre[at]),
            float(errors[at]),
            float(low[at]),
            float(high[at]),
            float(elo[at]),
            int((pairs == at).sum()),
            float(wins[at].sum()),
        )
        for at in order
    ]
    how = f"bootstrap over items, {bootstrap:,} samples" if bootstrap else "Fisher information"
    return Ratings(models, covariance[np.ix_(order, order)].tolist(), how)


def _questions(votes: Sequence[Vote]) -> list[str]:
    """The question of each vote; a vote that names none has one of its own."""
    return [vote.item or f"\0{number}" for number, vote in enumerate(votes)]


def bradley_terry(wins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The strengths of the highest likelihood, with mean 0, and their covariance; wins[i, j] are those of i against j.

    The strengths have to be finite: each group of models has lost against the others.
    """
    n = len(wins)
    games = wins + wins.T
    strengths = np.zeros(n)
    # Adding the same to all strengths changes nothing: the matrix of ones takes that direction out of the inverse.
    ones = np.full((n, n), 1 / n)

    def information(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        chance = 1 / (1 + np.exp(at[None, :] - at[:, None]))
        curvature = games * chance * (1 - chance)
        return (wins - games * chance).sum(axis=1), np.diag(curvature.sum(axis=1)) - curvature

    def likelihood(at: np.ndarray) -> float:
        return -float((wins * np.logaddexp(0, at[None, :] - at[:, None])).sum())

    for _ in range(_MOST_NEWTON):
        gradient, fisher = information(strengths)
        step = np.linalg.solve(fisher + ones, gradient)
        now, size = likelihood(strengths), 1.0
        while likelihood(strengths + size * step) < now and size > 1e-6:
            size /= 2
        strengths = strengths + size * step
        strengths -= strengths.mean()
        if np.abs(step).max() < 1e-12:
            break
    _, fisher = information(strengths)
    return strengths, np.linalg.inv(fisher + ones) - ones


def _wins(pairs: np.ndarray, results: np.ndarray, n: int, counts: np.ndarray | None = None) -> np.ndarray:
    """Wins of each model against each other, ties as halves; `counts` says how often each vote counts."""
    counts = np.ones(len(pairs)) if counts is None else counts
    i, j = pairs.T
    found = np.bincount(i * n + j, weights=counts * results, minlength=n * n)
    found += np.bincount(j * n + i, weights=counts * (1 - results), minlength=n * n)
    return found.reshape(n, n)


def _refuse_infinite(wins: np.ndarray, names: Sequence[str]) -> None:
    """Strengths are finite where each model reaches each other one over wins (Ford 1957)."""
    reaches = np.linalg.matrix_power((wins > 0).astype(np.float64) + np.eye(len(wins)), len(wins)) > 0
    apart = np.argwhere(~reaches)
    if len(apart):
        loser, winner = (names[int(at)] for at in apart[0])
        raise NapkinError(
            f"'{loser}' has won nothing against '{winner}', nor over others, so no rating is finite: add votes, or "
            "leave such models out"
        )


def _bootstrapped(
    votes: Sequence[Vote], pairs: np.ndarray, results: np.ndarray, n: int, samples: int, random: np.random.Generator
) -> np.ndarray:
    labels, n_items = numbered_groups(_questions(votes))
    # A sample in which a model has won nothing would have no finite rating: half a vote of each against the whole field
    # keeps all of them finite.
    prior = 0.5 / n * (1 - np.eye(n))
    drawn = np.empty((samples, n))
    for sample in range(samples):
        counts = np.bincount(random.integers(0, n_items, n_items), minlength=n_items)[labels]
        strengths, _ = bradley_terry(_wins(pairs, results, n, counts) + prior)
        drawn[sample] = ELO_START + ELO_SCALE * strengths
    return drawn


def elo_ratings(pairs: np.ndarray, results: np.ndarray, n: int, k_factor: float) -> np.ndarray:
    """Elo's ratings after all votes, in their order."""
    ratings = np.full(n, ELO_START)
    for (i, j), result in zip(pairs.tolist(), results.tolist(), strict=True):
        moved = k_factor * (result - 1 / (1 + 10 ** ((ratings[j] - ratings[i]) / 400)))
        ratings[i] += moved
        ratings[j] -= moved
    return ratings


def _mean_elo(
    pairs: np.ndarray, results: np.ndarray, n: int, orders: int, k_factor: float, random: np.random.Generator
) -> np.ndarray:
    total = np.zeros(n)
    for _ in range(orders):
        order = random.permutation(len(pairs))
        total += elo_ratings(pairs[order], results[order], n, k_factor)
    return total / orders


@dataclass(frozen=True)
class WinRate:
    """How often one model is preferred to another, ties as halves, and the judge's position bias."""

    model: str
    other: str
    rate: Estimate
    """Over items, each the mean of its votes: with both positions in equal numbers the judge's bias cancels."""
    p_value: float
    """Two-sided, of equal models: the randomization test over items."""
    first_wins: Estimate
    """How often the answer shown first is preferred; 0.5 for a judge without position bias."""
    both_positions: int
    """Items that were judged with either answer first."""
    consistent: float | None
    """The share of them on which the judge prefers the same answer, or sees a tie, both times; None without any."""


def win_rate(votes: Sequence[Vote], model: str, other: str) -> WinRate:
    """How often `model` is preferred to `other`. Raises NapkinError where no vote is between the two."""
    from napkin.evaluation.resampling import resampled_difference

    items: dict[str, list[Vote]] = defaultdict(list)
    for question, vote in zip(_questions(votes), votes, strict=True):
        if {vote.a, vote.b} == {model, other}:
            items[question].append(vote)
    if not items:
        raise NapkinError(f"there is no vote between '{model}' and '{other}': name two models that were compared")
    rates, consistent = [], []
    for chosen in items.values():
        # Each position counts the same, however often it was judged.
        sides = [[_for(model, vote) for vote in chosen if vote.a == first] for first in (model, other)]
        means = [sum(side) / len(side) for side in sides if side]
        rates.append(sum(means) / len(means))
        if len(means) == 2:
            consistent.append(float((means[0] - 0.5) * (means[1] - 0.5) > 0 or means == [0.5, 0.5]))
    voted = [(vote.result, item) for item, chosen in items.items() for vote in chosen]
    p_value = 1.0
    if len(rates) > 1:
        p_value = resampled_difference(rates, [0.5] * len(rates)).p_value
    return WinRate(
        model,
        other,
        mean_estimate(rates),
        p_value,
        mean_estimate([result for result, _ in voted], [item for _, item in voted]),
        len(consistent),
        sum(consistent) / len(consistent) if consistent else None,
    )


def _for(model: str, vote: Vote) -> float:
    return vote.result if vote.a == model else 1 - vote.result


def most_compared(votes: Sequence[Vote]) -> tuple[str, str]:
    """The two models with the most votes between them, in the order of their names."""
    counts = Counter(tuple(sorted((vote.a, vote.b))) for vote in votes)
    first, second = max(sorted(counts), key=lambda pair: counts[pair])
    return first, second
