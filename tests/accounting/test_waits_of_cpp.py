"""The seconds for which a rank waited in C++, where only the callbacks of collectives and the operators are known."""

import pytest

from napkin.accounting.collectives import CollectiveCall, TimedCollective, _add_waits_of_cpp

# Two operators, a pause of 2 seconds in which a collective ends, and three short operators after it.
OPERATORS = [(0.0, 0.1), (0.1, 0.2), (2.2, 2.201), (2.202, 2.203), (2.204, 2.205)]


def timed(entered: float, done: float) -> TimedCollective:
    return TimedCollective(CollectiveCall("all_reduce", 8, (0, 1)), entered, done=done)


@pytest.mark.parametrize("told", [2.2, 2.2005, 2.2025, 2.2045, 2.23])
def test_a_callback_that_comes_after_the_next_operators_tells_of_the_pause_before_them(told: float) -> None:
    found = timed(0.15, told)
    _add_waits_of_cpp([found], OPERATORS)
    assert found.exposed == pytest.approx(2.0, abs=1e-6 if told < 2.21 else 0.03)
    assert found.done == pytest.approx(2.2)


def test_what_ends_while_operators_run_was_not_waited_for() -> None:
    hidden = timed(0.05, 0.19)
    _add_waits_of_cpp([hidden], OPERATORS)
    assert (hidden.exposed, hidden.done) == (0.0, 0.19)


def test_a_pause_is_of_one_collective_as_far_as_it_was_waited_for() -> None:
    first, second = timed(0.12, 1.2), timed(0.15, 2.2025)
    _add_waits_of_cpp([second, first], OPERATORS)
    assert (first.exposed, second.exposed) == (pytest.approx(1.0), pytest.approx(1.0))
