"""Reward functions of the user's: what they do wrong is a failure with reward 0, and training goes on."""

from pathlib import Path

import pytest

from napkin.errors import NapkinError
from napkin.grading import Reward, reward_named
from napkin.grading.sandbox.confinement import can_confine
from napkin.grading.sandbox.own_function import OwnFunction

OWN = """
import os
import time

import numpy

WORDS = {"yes"}

def length(answer, reference):
    print("this is not an answer")
    return len(answer) / float(reference)

def scored(answer, reference):
    return numpy.float32(0.5)

def run(answer, reference):
    return eval(answer, {"os": os, "time": time, "open": open})
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_a_function_of_a_file_is_a_reward_whatever_it_does(path: str, tmp_path: Path) -> None:
    length = reward_named(f"{path}:length")
    assert [length("abcd", "8"), length("ab", "8"), length("ab", "none"), length("ab", "0"), length("é", "1")] == [
        0.5, 0.25, 0, 0, 1,
    ]  # fmt: skip
    assert sorted(length.failures) == [
        "ValueError: could not convert string to float: 'none'",
        "ZeroDivisionError: float division by zero",
    ]
    assert reward_named(f"{path}:scored")("", "") == 0.5
    late = Reward("late", OwnFunction(path, "run", most_seconds=0.5))
    assert late("time.sleep(60)", "") == 0
    assert list(late.failures) == ["run took longer than 0.5 s"]
    run = Reward("run", OwnFunction(path, "run", most_seconds=60.0))
    answers = {
        "1 + 1": 2.0,
        "'text'": 0.0,
        "float('nan')": 0.0,
        "os._exit(0)": 0.0,
        "2": 2.0,
        "3": 3.0,
        "exit()": 0.0,
    }
    assert {answer: run(answer, "") for answer in answers} == answers
    reasons = " ".join(run.failures)
    for reason in ("of type str", "the reward is nan", "ended its process"):
        assert reason in reasons, run.failures
    if can_confine():
        assert run(f"open({str(tmp_path / 'made.txt')!r}, 'w') and 1", "") == 0
        assert run("os.system('true') == 0", "") == 0
        assert not (tmp_path / "made.txt").exists()
        assert run(f"len(open({path!r}).read()) > 10", "") == 1


def test_a_function_that_is_not_there_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(NapkinError, match=r"'missing\.py'.*file"):
        reward_named("missing.py:length")
    with pytest.raises(NapkinError, match="has no function nothing"):
        reward_named(f"{path}:nothing")
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(NapkinError, match="ZeroDivisionError"):
        reward_named(f"{tmp_path / 'broken.py'}:length")
