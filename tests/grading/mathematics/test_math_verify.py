"""math-verify, a grader of its own, judges answers of two parts whose equality is known by construction."""

import logging
import random
from collections.abc import Iterator
from fractions import Fraction

import pytest

from napkin.grading import math_score
from peers import peer

pytestmark = pytest.mark.peers


def forms(value: Fraction) -> Iterator[str]:
    """Ways to write a fraction in LaTeX."""
    yield rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    yield f"{value.numerator}/{value.denominator}"
    yield rf"\dfrac{{{3 * value.numerator}}}{{{3 * value.denominator}}}"
    if (1000 % value.denominator) == 0:
        yield f"{float(value):.3f}"
    if value.denominator == 1:
        yield str(value.numerator)


def answers(seed: int) -> tuple[str, str, str]:
    """An answer, another form of it, and a wrong one: a number, a pair, or a multiple of a root."""
    draw = random.Random(seed)
    value = Fraction(draw.randrange(1, 200), draw.choice((1, 2, 4, 5, 7, 8, 25, 9)))
    wrong = value + draw.choice((1, -1, Fraction(1, 10)))
    one, other, third = (draw.choice([*forms(each)]) for each in (value, value, wrong))
    match seed % 3:
        case 0:
            return one, other, third
        case 1:
            second = str(draw.randrange(9))
            return f"({second}, {one})", f"({second},{other})", f"({second}, {third})"
        case _:
            # A slash before a root could divide by the root as well.
            one, other, third = (rf"\left({each}\right)" for each in (one, other, third))
            return rf"{one}\sqrt{{2}}", rf"{other} \cdot \sqrt{{2}}", rf"{third}\sqrt{{2}}"


def test_two_graders_agree_where_the_answer_is_known() -> None:
    math_verify = peer("math_verify")
    logging.disable(logging.CRITICAL)

    def theirs(answer: str, reference: str) -> bool:
        return math_verify.verify(math_verify.parse(f"${reference}$"), math_verify.parse(answer))

    for seed in range(150):
        one, other, wrong = answers(seed)
        for text, right in ((other, True), (wrong, False)):
            answer = rf"Therefore it is $\boxed{{{text}}}$."
            assert (math_score(answer, one) > 0) == right, (answer, one)
            assert theirs(answer, one) == right, (answer, one)
