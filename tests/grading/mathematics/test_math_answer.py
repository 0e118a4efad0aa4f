"""The grader gives no reward to a wrong answer, accepts equal forms, and does bounded work whatever it reads."""

import doctest
import json
import math
import random
from pathlib import Path
from types import ModuleType

import pytest

from napkin.errors import NapkinError
from napkin.evaluation.tasks.published import Item, Kind
from napkin.evaluation.tasks.running import generated_scores
from napkin.grading import answers, reward_named
from napkin.grading.mathematics import equality, final_answer, math_answer
from napkin.grading.mathematics.math_answer import answers_equal, check_number_reference, math_score, number_score

HERE = Path(__file__).parent
WRONG = [json.loads(line) for line in (HERE / "wrong_answers.jsonl").read_text().splitlines()]
RIGHT = [json.loads(line) for line in (HERE / "right_answers.jsonl").read_text().splitlines()]
EQUAL = [line.split("\t") for line in (HERE / "equal_answers.txt").read_text().splitlines() if not line.startswith("#")]
# Too long, or of characters that no file of text has.
LONG = {
    "a million digits": ("7" * 1_000_000, "7"),
    "a million digits in a box": ("\\boxed{" + "7" * 1_000_000 + "}", "7"),
    "a tower of 100,000 powers": ("\\boxed{" + "9^" * 100_000 + "9}", "9"),
    "100,000 brackets": ("\\boxed{" + "(" * 100_000 + "7" + ")" * 100_000 + "}", "7"),
    "1,900 decimals": ("\\boxed{0." + "3" * 1_900 + "}", "1/3"),
    "900 decimals": ("\\boxed{0." + "3" * 900 + "}", "1/3"),
    "100,000 boxes that are not closed": ("\\boxed{" * 100_000 + "7", "7"),
    "a box of 50,000 that is not closed": ("\\boxed{" * 50_000 + "7" + "}" * 49_999, "7"),
    "100,000 dollars": ("$" * 100_000, "7"),
    "50,000 marks": ("####" * 50_000, "7"),
    "20,000 announcements": ("answer is " * 20_000, "7"),
    "50,000 empty boxes": ("\\boxed{7}" + "\\boxed{}" * 50_000, "7"),
    "500 items": ("\\boxed{" + ",".join(["7"] * 500) + "}", "7"),
    "5,000 braces": ("\\boxed{" + "{" * 5_000 + "7" + "}" * 5_000 + "}", "8"),
    "300 fractions": ("\\boxed{" + "\\frac{1}{" * 300 + "1" + "}" * 300 + "}", "1"),
    "100 fractions": ("\\boxed{" + "\\frac{1}{" * 100 + "1" + "}" * 100 + "}", "1"),
    "300 roots": ("\\boxed{" + "\\sqrt{" * 300 + "7" + "}" * 300 + "}", "7"),
    "20 roots": ("\\boxed{" + "\\sqrt{" * 20 + "7" + "}" * 20 + "}", "7"),
    "1,500 signs": ("\\boxed{" + "-" * 1_500 + "7}", "7"),
    "1,500 factorials": ("\\boxed{7" + "!" * 1_500 + "}", "7"),
    "90 squares": ("\\boxed{" + "x^2+" * 90 + "1}", "x"),
    "a power of a sum": ("\\boxed{(x+1)^{4000}}", "x"),
    "a power of a power": ("\\boxed{((x+y)^{99})^{99}}", "1"),
    "150 sines": ("\\boxed{" + "\\sin " * 150 + "1}", "1"),
    "60 sines": ("\\boxed{" + "+".join(f"\\sin({n}x)" for n in range(60)) + "}", "x"),
    "60 powers": ("\\boxed{" + "+".join(f"x^{{0.{n}1}}" for n in range(60)) + "}", "x"),
    "64 items in the other order": (
        "\\boxed{\\{" + ",".join(f"\\sqrt{{{n}}}" for n in range(64)) + "\\}}",
        "\\{" + ",".join(f"\\sqrt{{{n}}}+1" for n in reversed(range(64))) + "\\}",
    ),
    "a long product": ("\\boxed{" + "*".join(["987654321/123456789"] * 90) + "}", "7"),
    "a long sum": ("\\boxed{" + "+".join(f"1/{n}" for n in range(9_000, 9_090)) + "}", "7"),
    "400 signs of a sum": ("\\boxed{" + "+".join(["1"] * 199) + "}", "198"),
    "100,000 boxes of a list": ("\\boxed{7}, " * 20_000, "7"),
    "100,000 boxes without braces": ("\\boxed 7, " * 20_000, "7"),
    "boxes far apart": (("\\boxed{8}" + " " * 58) * 5_000, "7"),
    "100,000 spaces": ("The answer is 7" + " " * 99_000 + "or 8", "7"),
    "50,000 announcements of boxes": ("\\boxed{7} wait the answer is 8 " * 5_000, "7"),
    "a conclusion of spaces": ("so" + " " * 900 + "7" + " " * 90 + "or 8", "7"),
    "50,000 tags": ("<answer>7</answer>" * 20_000 + "<answer>", "7"),
    "100,000 stars": ("answer" + "*" * 99_000 + ": 8", "7"),
    "bold without end": ("The answer is " + "**7" * 300, "7"),
    "a long repetition": ("\\boxed{0.\\overline{" + "3" * 1_000 + "}}", "1/3"),
    "an array of columns": ("\\boxed{\\begin{array}{" + "c" * 1_000 + "}7\\end{array}}", "7"),
    "300 number words": ("\\boxed{" + "one hundred and " * 100 + "}", "7"),
    "300 signs of about": ("\\boxed{" + "7\\approx " * 200 + "7}", "7"),
    "300 tags of choices": ("\\boxed{" + "(C) " * 450 + "7}", "7"),
    "a null byte": ("\\boxed{5\x00}", "5"),
    "half of a character": ("\\boxed{5\ud800}", "5"),
    "control characters": ("\\boxed{\x015\x02}", "5"),
}


def test_the_tables_are_as_long_as_is_promised() -> None:
    assert len(WRONG) + len(LONG) >= 700
    assert len(RIGHT) >= 250
    assert len({row["answer"] + "/" + row["reference"] for row in WRONG}) == len(WRONG)
    assert len(EQUAL) >= 500
    assert len({tuple(pair) for pair in EQUAL}) == len(EQUAL)


@pytest.mark.parametrize("reward", [math_score, number_score])
def test_no_wrong_answer_is_rewarded(reward: object) -> None:
    grade = math_score if reward is math_score else number_score
    rewarded = [(row["answer"], row["reference"]) for row in WRONG if grade(row["answer"], row["reference"])]
    assert rewarded == []


def test_right_answers_are_found_wherever_a_text_says_them() -> None:
    """All by the number's grader, too, where the reference is a number."""
    refused = [
        (row["answer"], row["reference"], grade.__name__)
        for row in RIGHT
        for grade in ((math_score, number_score) if row["grader"] == "math" else (number_score,))
        if not grade(row["answer"], row["reference"]) and (grade is math_score or is_number(row["reference"]))
    ]
    assert refused == []


def is_number(reference: str) -> bool:
    try:
        check_number_reference(reference)
    except NapkinError:
        return False
    return True


@pytest.mark.thorough
def test_evaluation_and_rewards_agree_on_every_answer() -> None:
    """The score of a task's item is the reward of the same name; so is that of texts that nobody has marked."""
    draw = random.Random(0)
    pieces = [row["answer"] for row in [*WRONG, *RIGHT] if len(row["answer"]) < 200]
    texts = [row["answer"] for row in [*WRONG, *RIGHT]] + ["\n".join(draw.sample(pieces, 2)) for _ in range(300)]
    references = [row["reference"] for row in [*WRONG, *RIGHT]] + draw.choices(["42", "7", "5", "C"], k=300)
    kinds: tuple[Kind, ...] = ("number", "math", "exact")
    for kind in kinds:
        reward = reward_named(kind)
        for text, reference in zip(texts, references, strict=True):
            _, scores = generated_scores(kind, Item("x", "?", answer=reference), text)
            assert scores["exact_match"] == reward(text, reference), (kind, text, reference)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", LONG)
def test_no_long_answer_is_rewarded(name: str) -> None:
    answer, reference = LONG[name]
    assert math_score(answer, reference) == 0
    assert number_score(answer, reference) == 0


def test_equal_forms_are_accepted_either_way() -> None:
    refused = [
        pair
        for answer, reference in EQUAL
        for pair in ((answer, reference), (reference, answer))
        if not math_score(f"Hence\n$\\boxed{{{pair[0]}}}$.", pair[1])
    ]
    assert refused == []


def test_an_answer_is_equal_to_itself() -> None:
    assert [text for pair in EQUAL for text in pair if not answers_equal(text, text)] == []


def test_the_number_reward_takes_numbers_alone() -> None:
    for answer, reference in [
        ("72", "72"),
        ("The answer is 72 books.", "72"),
        ("#### 1,026", "so\n#### 1026"),
        ("1/2", "0.5"),
    ]:
        assert number_score(answer, reference) == 1, answer
    assert number_score("So 48 + 24 = 72 clips.", "72") == 1
    for answer, reference in [("x", "x"), ("(1,2)", "(1,2)"), ("x=y", "x=y"), ("pi", "pi"), ("72 clips or 73", "72")]:
        assert number_score(answer, reference) == 0, answer


@pytest.mark.parametrize(
    ("name", "reference"), [("math", ""), ("math", "so \\boxed{"), ("math", "9" * 3000), ("number", "x + 1")]
)
def test_a_reference_that_nothing_equals_is_refused(name: str, reference: str) -> None:
    with pytest.raises(NapkinError, match="reference"):
        reward_named(name).check_reference(reference)


@pytest.mark.parametrize(
    ("seed", "n"), [(0, 16), *(pytest.param(n, 60, marks=pytest.mark.torture) for n in range(1, 4))]
)
def test_values_are_those_of_floating_point(seed: int, n: int) -> None:
    """Random expressions: two are equal where their values in float64 are, and no others."""
    draw = random.Random(seed)

    def drawn(depth: int) -> tuple[str, float]:
        if depth == 0:
            number = draw.randint(1, 9)
            return str(number), float(number)
        kind = draw.choice(["+", "-", "*", "frac", "sqrt", "square"])
        (one, left), (other, right) = drawn(depth - 1), drawn(depth - 1)
        if kind == "frac" and abs(right) > 1e-9:
            return f"\\frac{{{one}}}{{{other}}}", left / right
        if kind == "sqrt":
            return f"\\sqrt{{|{one}|}}", math.sqrt(abs(left))
        if kind == "square":
            return f"({one})^2", left * left
        operator = kind if kind in "+-*" else "+"
        return f"({one}){operator}({other})", {"+": left + right, "-": left - right, "*": left * right}[operator]

    expressions = [drawn(draw.choice([1, 1, 2])) for _ in range(n)]
    for one, value in expressions:
        for other, other_value in expressions:
            same = math.isclose(value, other_value, rel_tol=1e-9, abs_tol=1e-9)
            assert answers_equal(one, other) == same, (one, other)


@pytest.mark.parametrize("module", [answers, final_answer, math_answer, equality], ids=lambda each: each.__name__)
def test_the_examples_of_docstrings_are_true(module: ModuleType) -> None:
    tried = doctest.testmod(module)
    assert (tried.failed, tried.attempted > 0) == (0, True)
