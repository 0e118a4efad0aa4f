"""A reward that fails is 0, and is counted and named."""

import doctest
import math
import time
from collections import Counter
from types import ModuleType

import pytest

from napkin.environments import puzzles, registry
from napkin.errors import NapkinError, NotJudged
from napkin.grading import Reward, reward_named
from napkin.grading import reward as reward_module
from napkin.grading.reward import MOST_REASONS, OTHER_REASONS

MODULES = [puzzles, reward_module, puzzles, registry]


def graded_by_eval(answer: str, reference: str) -> float:
    if answer == "refuse":
        raise NotJudged("it took too long")
    return eval(answer)


def test_what_raises_or_is_not_a_finite_number_is_0_and_counted_by_its_reason() -> None:
    reward = Reward("own", graded_by_eval)
    answers = ["0.5", "1/0", "float('nan')", "float('inf')", "'text'", "refuse", "1/0", "True", "2"]
    assert [reward(each, "") for each in answers] == [0.5, 0, 0, 0, 0, 0, 0, 1, 2]
    assert reward.failures == Counter(
        {
            "ZeroDivisionError: division by zero": 2,
            "the reward is nan: a finite number is needed": 1,
            "the reward is inf: a finite number is needed": 1,
            "the reward is of type str: a finite number is needed": 1,
            "it took too long": 1,
        }
    )
    judged = reward.judge("1/0", "")
    assert (judged.reward, judged.failure) == (0.0, "ZeroDivisionError: division by zero")


def test_reasons_that_differ_in_each_answer_do_not_grow_without_end() -> None:
    reward = Reward("own", lambda answer, reference: float("x" + answer))
    assert [reward(str(number), "") for number in range(100)] == [0.0] * 100
    assert len(reward.failures) == MOST_REASONS + 1
    assert reward.failures[OTHER_REASONS] == 100 - MOST_REASONS


def test_several_answers_are_judged_in_their_order_whoever_is_ready_first() -> None:
    def slow(answer: str, reference: str) -> float:
        time.sleep(0.01 * (answer == "0"))
        return math.inf if answer == "3" else float(answer)

    reward = Reward("own", slow, n_parallel=4)
    judged = reward.judge_all([(str(number), "") for number in range(6)])
    assert [each.reward for each in judged] == [0, 1, 2, 0, 4, 5]
    assert reward.failures.total() == 1


def test_exact_match_forgives_white_space_alone() -> None:
    reward = reward_named("exact")
    assert reward(" to  be\n", "to be") == 1
    for wrong in ("To be", "tobe", "to be.", "", "to be or not to be"):
        assert reward(wrong, "to be") == 0, wrong


def test_an_unknown_reward_is_named_with_the_one_that_is_meant() -> None:
    with pytest.raises(NapkinError, match=r"'exat'.*reward: did.*'exact'"):
        reward_named("exat")


@pytest.mark.parametrize("module", MODULES, ids=lambda each: each.__name__)
def test_the_examples_of_docstrings_are_true(module: ModuleType) -> None:
    tried = doctest.testmod(module)
    assert (tried.failed, tried.attempted > 0) == (0, True)
