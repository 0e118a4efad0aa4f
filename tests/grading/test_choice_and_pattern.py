"""Choices are letters; patterns are bounded in time; formats are tags in their order."""

import random
import re

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


def test_a_format_is_what_a_regular_expression_says_of_it() -> None:
    no_tag = r"(?!</?think>|</?answer>)"
    inside = rf"(?:{no_tag}.)*{no_tag}\S(?:{no_tag}.)*"
    expected = re.compile(rf"\s*<think>{inside}</think>\s*<answer>{inside}</answer>\s*", re.DOTALL)
    reward = reward_named("format:think,answer")
    draw, pieces = random.Random(0), ["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n", "<b>", "<think"]
    right = "<think> a b</think>\n<answer>c</answer>"
    answers = ["".join(draw.choices(pieces, k=draw.randint(0, 7))) for _ in range(3000)]
    # A right answer with a piece more, or a character less.
    for _ in range(3000):
        at = draw.randint(0, len(right))
        answers.append(right[:at] + draw.choice(pieces) + right[at:])
        answers.append(right[:at] + right[at + 1 :])
    rewards = [reward(each, "not read") for each in answers]
    assert rewards == [float(expected.fullmatch(each) is not None) for each in answers]
    assert 100 < sum(rewards) < 5000


def test_a_sum_of_rewards_has_their_weights() -> None:
    reward = reward_named("number + 0.25 * format:think,answer + -1 * exact")
    assert reward("<think>2+2</think><answer>4</answer>", "4") == 1.25
    assert reward("the answer is 4", "4") == 1
    assert reward("<think>2+2</think><answer>5</answer>", "4") == 0.25
    assert reward("4", "4") == 0
    with pytest.raises(NapkinError, match="'blue'"):
        reward_named("choice + 0.5 * format:think").check_reference("blue")
    # Where one cannot be had, nothing is.
    reward = reward_named("1 * regex + 1 * format:think")
    assert reward("<think>" + "a" * 5_000 + "b</think>", r"<think>((?:a|aa|a?)+c|(a+)+)</think>") == 0
    assert reward.failures.total() == 1


@pytest.mark.parametrize(
    "name",
    ["format", "format:", "format:a b", "format:a,a", "formt:a", "x * math + math", "nan * math + math", "math +"],
)
def test_a_reward_that_is_not_one_is_refused(name: str) -> None:
    with pytest.raises(NapkinError):
        reward_named(name)
