"""Ratings beside scipy's optimizer, closed forms and simulations; votes of a model beside its log-probabilities."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from napkin.errors import NapkinError
from napkin.evaluation.judging import LETTERS, TEMPLATE, Comparison, format_vote, judged_votes, read_comparisons
from napkin.evaluation.pairwise import ELO_SCALE, Vote, elo_ratings, ratings_of, read_votes, win_rate
from napkin.evaluation.tasks.results import ItemLog, open_log
from oracles.served_model import tiny_served_model


def simulated(strengths: list[float], n: int, seed: int, *, first: float = 0.0) -> list[Vote]:
    draw = np.random.default_rng(seed)
    votes = []
    for number in range(n):
        i, j = draw.choice(len(strengths), 2, replace=False)
        chance = 1 / (1 + math.exp(strengths[j] - strengths[i] - first))
        votes.append(Vote(f"m{i}", f"m{j}", "a" if draw.random() < chance else "b", str(number)))
    return votes


def test_strengths_and_their_errors_are_those_of_the_likelihood() -> None:
    from scipy import optimize

    votes = [*simulated([0.0, 0.7, -0.4, 1.1], 300, 0), Vote("m0", "m1", "tie"), Vote("m2", "m1", "tie")]

    def loss(free: np.ndarray) -> float:
        # m0 is held at 0.
        b = np.concatenate(([0.0], free))
        total = 0.0
        for vote in votes:
            gap = b[int(vote.a[1])] - b[int(vote.b[1])]
            total += vote.result * math.log1p(math.exp(-gap)) + (1 - vote.result) * math.log1p(math.exp(gap))
        return total

    found = optimize.minimize(loss, np.zeros(3), tol=1e-10)
    b = np.concatenate(([0.0], found.x))
    ratings = ratings_of(votes, orders=1)
    by_name = {each.model: each.rating for each in ratings.models}
    expected = 1000 + ELO_SCALE * (b - b.mean())
    assert [by_name[f"m{n}"] for n in range(4)] == pytest.approx(expected.tolist(), abs=1e-2)
    # The curvature by differences of the loss itself.
    step, hessian = 1e-3, np.empty((3, 3))
    for i in range(3):
        for j in range(3):
            e, f = np.eye(3)[i] * step, np.eye(3)[j] * step
            hessian[i, j] = (
                loss(found.x + e + f) - loss(found.x + e - f) - loss(found.x - e + f) + loss(found.x - e - f)
            ) / (4 * step**2)
    covariance = np.linalg.inv(hessian)
    difference, error = ratings.difference("m3", "m0")
    assert difference == pytest.approx(ELO_SCALE * found.x[2], abs=1e-2)
    assert error == pytest.approx(ELO_SCALE * math.sqrt(covariance[2, 2]), rel=1e-3)


def test_of_two_models_the_strength_is_the_log_of_the_odds() -> None:
    votes = [Vote("x", "y", "a")] * 30 + [Vote("x", "y", "b")] * 10
    ratings = ratings_of(votes, orders=1)
    difference, error = ratings.difference("x", "y")
    assert difference == pytest.approx(400 * math.log10(3))
    assert error == pytest.approx(ELO_SCALE / math.sqrt(40 * 0.75 * 0.25))
    assert (ratings.models[0].votes, ratings.models[0].wins) == (40, 30)


def test_bootstrap_and_fisher_agree_on_independent_votes_and_intervals_cover() -> None:
    strengths = [0.0, 0.5, 1.0]
    true = 1000 + ELO_SCALE * (np.array(strengths) - np.mean(strengths))
    fisher = ratings_of(simulated(strengths, 400, 1), orders=1)
    boot = ratings_of(simulated(strengths, 400, 1), bootstrap=300, orders=1)
    for one, other in zip(fisher.models, boot.models, strict=True):
        assert other.standard_error == pytest.approx(one.standard_error, rel=0.2)
    covered = 0
    for seed in range(60):
        for each in ratings_of(simulated(strengths, 200, 100 + seed), orders=1).models:
            covered += each.low <= true[int(each.model[1])] <= each.high
    # 95% of 180, within four standard errors.
    assert 160 <= covered <= 180


def test_elo_moves_by_what_was_not_expected() -> None:
    found = elo_ratings(np.array([[0, 1], [0, 1]]), np.array([1.0, 0.5]), 2, 32)
    first = 16.0
    second = 32 * (0.5 - 1 / (1 + 10 ** (-2 * first / 400)))
    assert found.tolist() == pytest.approx([1000 + first + second, 1000 - first - second])


def test_models_that_nobody_beat_have_no_rating() -> None:
    with pytest.raises(NapkinError, match="'y' has won nothing against 'x'"):
        ratings_of([Vote("x", "y", "a"), Vote("x", "y", "a")])
    with pytest.raises(NapkinError, match="nor over others"):
        ratings_of([*simulated([0.0, 0.1], 30, 0), Vote("p", "q", "a"), Vote("p", "q", "b")])


def test_a_judge_that_heeds_positions_alone_sees_no_difference() -> None:
    votes = []
    for n in range(20):
        votes += [Vote("x", "y", "a", str(n)), Vote("y", "x", "a", str(n))]
    found = win_rate(votes, "x", "y")
    assert (found.rate.mean, found.p_value, found.first_wins.mean) == (0.5, 1.0, 1.0)
    assert (found.both_positions, found.consistent) == (20, 0.0)
    # Three of four items are judged alike in both positions.
    votes = [
        vote for n in range(4) for vote in (Vote("x", "y", "a", str(n)), Vote("y", "x", "b" if n else "a", str(n)))
    ]
    found = win_rate(votes, "x", "y")
    assert found.rate.mean == (3 + 0.5) / 4
    assert found.first_wins.mean == 5 / 8
    assert found.consistent == 0.75


def test_votes_of_a_model_are_the_likelier_letters_in_both_positions(tmp_path: Path) -> None:
    judge = tiny_served_model()
    rows = [{"id": str(n), "prompt": f"Say {n} {{first}}.", "answer": f"It is {n}"} for n in range(5)]
    for name, end in (("x", ""), ("y", "!")):
        text = "".join(json.dumps({**row, "answer": row["answer"] + end}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    comparisons = read_comparisons([tmp_path / "x.jsonl", tmp_path / "y.jsonl"])
    votes = judged_votes(judge, comparisons, ("x", "y"), ItemLog(None, {}))
    expected = []
    for each in comparisons:
        for names, answers in ((("x", "y"), each.answers), (("y", "x"), each.answers[::-1])):
            # The braces of the prompt are its own.
            text = (
                TEMPLATE.replace("{first}", answers[0]).replace("{second}", answers[1]).replace("{prompt}", each.prompt)
            )
            ids = [*judge.start_ids, *judge.encode(text)]
            a, b = (judge.logprobs([(ids, judge.encode(letter))])[0] for letter in LETTERS)
            expected.append(Vote(names[0], names[1], "a" if a > b else "b", each.item))
    assert votes == expected
    (tmp_path / "votes.jsonl").write_text("".join(map(format_vote, votes)))
    assert read_votes(tmp_path / "votes.jsonl") == votes
    assert {
        vote.winner for vote in judged_votes(judge, comparisons, ("x", "y"), ItemLog(None, {}), tie_margin=0.999999)
    } == {"tie"}
    with pytest.raises(NapkinError, match=r"no \{second\}"):
        judged_votes(judge, comparisons, ("x", "y"), ItemLog(None, {}), template="{prompt} {first}")
    with pytest.raises(NapkinError, match="the judge's context is"):
        judged_votes(judge, [Comparison("long", "a" * 3000, ("b", "c"))], ("x", "y"), ItemLog(None, {}))


def test_an_interrupted_judge_goes_on_where_it_was(tmp_path: Path) -> None:
    judge = tiny_served_model()
    asked = []

    def judge_until(calls: float) -> Any:
        """The judge, which is interrupted when it has been asked so often."""

        def logprobs(pairs: list[Any]) -> list[float]:
            if len(asked) >= calls:
                raise KeyboardInterrupt
            asked.append(len(pairs))
            return judge.logprobs(pairs)

        watched = copy.copy(judge)
        object.__setattr__(watched, "logprobs", logprobs)
        return watched

    comparisons = [Comparison(str(n), f"Say {n}.", (f"It is {n}", f"{n}!")) for n in range(20)]
    whole = judged_votes(judge, comparisons, ("x", "y"), ItemLog(None, {}))
    with pytest.raises(KeyboardInterrupt), open_log(tmp_path / "log", {}) as log:
        judged_votes(judge_until(1), comparisons, ("x", "y"), log)
    with open_log(tmp_path / "log", {}) as log:
        assert judged_votes(judge_until(math.inf), comparisons, ("x", "y"), log) == whole
    # Four prompts of a comparison, 16 comparisons at a time.
    assert asked == [64, 16]


def test_what_is_no_vote_is_named(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    path.write_text('{"a": "x", "b": "y", "winner": "x"}\n\n{"a": "x", "b": "y", "winner": "c"}\n')
    with pytest.raises(NapkinError, match=r"line 3 is not a vote .*winner is 'c'"):
        read_votes(path)
    path.write_text('{"a": "x", "b": "x", "winner": "a"}\n')
    with pytest.raises(NapkinError, match="not the names of two models"):
        read_votes(path)
