import pytest

from napkin.accounting.rank_seconds import seconds_of_ranks

BOTH = [0, 1]


def told(*calls: list, seconds: float = 1.0) -> dict:
    return {"peak_bytes": 5, "seconds": seconds, "calls": list(calls)}


def test_waiting_is_until_the_last_rank_enters_and_that_rank_is_the_straggler() -> None:
    # Rank 1 enters 0.3 s later; both then exchange for 0.1 s, half of which rank 1 computes.
    early = told(["all_reduce", 8, BOTH, 10.0, 0.4, 0.4], ["all_reduce", 8, BOTH, 10.6, 0.1, 0.1])
    late = told(["all_reduce", 8, BOTH, 10.3, 0.05, 0.1], ["all_reduce", 8, BOTH, 10.6, 0.1, 0.1])
    (first, second), straggler = seconds_of_ranks([early, late], pipelined=False)
    assert straggler == 1
    assert (first.waiting_seconds, second.waiting_seconds) == (pytest.approx(0.3), 0.0)
    assert (first.exposed_seconds, first.compute_seconds) == (pytest.approx(0.5), pytest.approx(0.5))
    assert (second.exposed_seconds, second.hidden_seconds) == (pytest.approx(0.15), pytest.approx(0.05))
    (kind,) = first.collectives
    assert (kind.operation, kind.calls, kind.bytes, kind.seconds) == ("all_reduce", 2, 16, pytest.approx(0.5))


def test_waiting_for_another_stage_is_a_bubble_only_in_a_pipeline() -> None:
    rank = told(["receive", 8, BOTH, 10.0, 0.2, 0.2])
    (bubble, _), straggler = seconds_of_ranks([rank, told()], pipelined=True)
    (exposed, _), _ = seconds_of_ranks([rank, told()], pipelined=False)
    assert (bubble.bubble_seconds, bubble.exposed_seconds) == (0.2, 0)
    assert (exposed.bubble_seconds, exposed.exposed_seconds) == (0, 0.2)
    assert straggler is None


def test_ranks_that_wait_for_each_other_in_turn_have_no_straggler() -> None:
    one = told(["all_reduce", 8, BOTH, 10.0, 0.3, 0.3], ["all_reduce", 8, BOTH, 10.6, 0.0, 0.0])
    other = told(["all_reduce", 8, BOTH, 10.3, 0.0, 0.0], ["all_reduce", 8, BOTH, 10.3, 0.3, 0.3])
    assert seconds_of_ranks([one, other], pipelined=False)[1] is None
