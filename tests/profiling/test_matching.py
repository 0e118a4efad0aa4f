"""Calls find their rows, whatever one of both has alone."""

import doctest
import random

from napkin.profiling import operator_calls
from napkin.profiling.operator_calls import matched_rows

NAMES = ["mm", "add", "mul", "view", "t", "sum", "exp", "copy_", "_to_copy"]


def test_the_examples_in_the_docstring_are_true() -> None:
    assert doctest.testmod(operator_calls).failed == 0


def test_the_same_operators_are_matched_one_by_one() -> None:
    names = random.Random(0).choices(NAMES, k=5000)
    assert matched_rows(names, names) == list(range(5000))


def test_calls_and_rows_that_one_has_alone_are_left_out() -> None:
    generator = random.Random(1)
    for _ in range(100):
        common = generator.choices(NAMES, k=400)
        calls: list[str] = []
        rows: list[str] = []
        expected: list[int | None] = []
        for place, name in enumerate(common):
            # Names that nothing else has, a few at a time, with operators in step between them.
            if place % 20 == 10:
                alone = [f"alone{place}"] * generator.randint(1, 5)
                if generator.random() < 0.5:
                    calls += alone
                    expected += [None] * len(alone)
                else:
                    rows += alone
            expected.append(len(rows))
            calls.append(name)
            rows.append(name)
        assert matched_rows(calls, rows) == expected


def test_nothing_alike_ends() -> None:
    assert matched_rows(["a"] * 500, ["b"] * 500) == [None] * 500
    assert matched_rows([], ["a"]) == []
    assert matched_rows(["a"], []) == [None]
