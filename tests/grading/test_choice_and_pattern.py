"""Choices are letters; patterns are bounded in time."""

import pytest

from napkin.errors import NapkinError
from napkin.grading import reward_named

RIGHT = [
    "B",
    "(B)",
    "B.",
    "b",
    "B)",
    "The answer is B.",
    "The answer is (B)",
    r"\boxed{B}",
    r"\boxed{\text{B}}",
    "#### B",
]
RIGHT += [
    r"\boxed{\textbf{(B)}}",
    "**B**",
    "B. Paris",
    "(B) Paris",
    "B) the blue one",
    "so\n**Answer: B**",
    "Answer: B",
    r"\boxed{\textbf{(B)}\ 12}",
    r"\boxed{\textbf{(B) } 12}",
    r"\boxed{\text{B) Paris}}",
    r"\boxed{\mathrm{(B)}~12}",
    "**Answer:** (B) Paris",
    "<answer>B</answer>",
    "<think>A or C?</think>\n<answer>(B)</answer>",
    "The correct answer is **B**.",
    r"$\boxed B$",
]
WRONG = [
    "A",
    "",
    "A or B",
    "B or A",
    "AB",
    "B, C",
    "BC",
    "(A)(B)",
    "not B",
    "Both",
    "B and C",
    "B. or C.",
    "B) no, (A)",
]
WRONG += [
    r"\boxed{B} or \boxed{A}",
    r"\boxed{B",
    "A) B) C) D)",
    "Be careful",
    "The answer is A. B is wrong",
    "Б",
    "В",
    "Ｂ",
]
WRONG += [
    "A B C D",
    r"\boxed{\textbf{(A)}\ 12}",
    r"\boxed{\textbf{(A)}\ B}",
    r"\boxed{\textbf{(B)}\ \text{or (C)}}",
    r"\boxed{(B)x}",
    r"\boxed{B} is wrong",
    r"not \boxed{B}",
    "<answer>B",
    "<think>\\boxed{B}",
    "<answer>B</answer><answer>C</answer>",
    "The answer is not B",
    "B?",
    "B? C?",
    "I choose B" * 100,
    "The best answer",
    "\\boxed{}B",
    "B" * 100_000,
    "(" * 100_000 + "B",
    "\\boxed{B" + ")" * 3_000 + "!}",
]


def test_a_choice_is_the_one_letter_of_the_final_answer() -> None:
    reward = reward_named("choice")
    assert [each for each in RIGHT if not reward(each, "B")] == []
    assert [each for each in WRONG if reward(each, "B")] == []
    assert reward.failures.total() == 0
    with pytest.raises(NapkinError, match=r"'blue'.*choice: give"):
        reward.check_reference("blue")


def test_a_pattern_matches_the_whole_answer() -> None:
    reward = reward_named("regex")
    assert reward(" 2026-01-31\n", r"\d{4}-\d\d-\d\d") == 1
    assert reward("on 2026-01-31", r"\d{4}-\d\d-\d\d") == 0
    assert reward("x" * 200_000, "x+") == 0


def test_a_pattern_that_explodes_is_a_failure_and_not_a_wait() -> None:
    reward = reward_named("regex")
    assert reward("a" * 5_000 + "b", r"(?:a|aa|a?)+c|(a+)+$") == 0
    assert list(reward.failures) == ["the pattern '(?:a|aa|a?)+c|(a+)+$' takes longer than 1 s"]


@pytest.mark.parametrize("pattern", ["(", "[", "a{100000}{100000}", "(?R)", "x" * 20_000])
def test_a_reference_that_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(NapkinError):
        reward_named("regex").check_reference(pattern)
