"""Samples are taken in turns, after a warm-up, on a clock that the tests make: none asserts real seconds."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from napkin.hardware.sampling import Sampling, Timed, cache_bytes, evictor, ratio_interval, sample_in_turns


class FakeTime:
    """Time that passes only in calls: each takes its seconds, times a factor that grows from call to call."""

    def __init__(self, growth: float = 1.0) -> None:
        self.now, self.factor, self.growth = 0.0, 1.0, growth
        self.log: list[str] = []

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.now += seconds * self.factor
            self.factor *= self.growth

        return run

    def clock(self, call: Callable[[], object], calls: int) -> float:
        begin = self.now
        for _ in range(calls):
            call()
        return (self.now - begin) / calls


def test_calls_are_warmed_up_and_then_alternate_there_and_back() -> None:
    time = FakeTime()
    timed = [Timed(time.call("a", 1.0)), Timed(time.call("b", 2.0))]
    samples = sample_in_turns(timed, time.clock, Sampling(seconds=0, least=3), now=lambda: time.now)
    assert samples == [[1.0] * 3, [2.0] * 3]
    assert "".join(time.log) == "aabb" + "ab" + "ba" + "ab"


@pytest.mark.parametrize("growth", [1.001, 0.999])
def test_a_steady_drift_does_not_favour_the_first(growth: float) -> None:
    time = FakeTime(growth)
    timed = [Timed(time.call("a", 1.0)), Timed(time.call("b", 1.0))]
    first, second = sample_in_turns(timed, time.clock, Sampling(seconds=0, least=40), now=lambda: time.now)
    ratio = ratio_interval(first, second)
    assert ratio.median == pytest.approx(1, abs=1e-6)
    # Of pairs in one order alone, all ratios would be on one side of 1.
    assert ratio.low < 1 < ratio.high


def test_short_calls_share_a_sample_unless_each_needs_a_preparation() -> None:
    time = FakeTime()
    sampling = Sampling(seconds=0, least=2, shortest=1e-3)
    sample_in_turns([Timed(time.call("a", 1e-4))], time.clock, sampling, now=lambda: time.now)
    assert len(time.log) == 2 + 2 * 10
    time = FakeTime()
    timed = Timed(time.call("c", 1e-4), time.call("p", 5.0))
    assert sample_in_turns([timed], time.clock, sampling, now=lambda: time.now) == [[pytest.approx(1e-4)] * 2]
    assert "".join(time.log) == "pc" * 4


def test_a_cold_cache_is_emptied_before_each_sample_and_after_its_preparation() -> None:
    time = FakeTime()
    sampling = Sampling(seconds=0, least=2, evict=time.call("e", 1.0))
    timed = Timed(time.call("c", 1e-4), time.call("p", 1.0))
    sample_in_turns([timed], time.clock, sampling, now=lambda: time.now)
    assert "".join(time.log) == "pcpc" + "pec" * 2


def test_others_in_turn_leave_the_cache_to_a_short_call_that_is_made_once_more() -> None:
    time = FakeTime()
    timed = [Timed(time.call("s", 0.01)), Timed(time.call("l", 1.0))]
    sample_in_turns(timed, time.clock, Sampling(seconds=0, least=1), now=lambda: time.now)
    assert "".join(time.log) == "ssll" + "ss" + "l"


@pytest.mark.parametrize(("seconds", "most", "expected"), [(10.0, 300, 10), (10.0, 8, 8), (1.0, 300, 6)])
def test_the_budget_of_seconds_ends_the_samples_between_the_fewest_and_the_most(
    seconds: float, most: int, expected: int
) -> None:
    time, shares = FakeTime(), list[float]()
    timed, sampling = [Timed(time.call("a", 1.0))], Sampling(seconds=seconds, most=most)
    (samples,) = sample_in_turns(timed, time.clock, sampling, now=lambda: time.now, progress=shares.append)
    assert len(samples) == expected
    assert (shares, shares[-1]) == (sorted(shares), 1.0)


def test_the_last_cache_is_the_largest_that_the_system_names(tmp_path: Path) -> None:
    assert cache_bytes("cpu", tmp_path) == 32 * 2**20
    for number, size in enumerate(("48K", "1024K", "260M", "odd")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size + "\n")
    assert cache_bytes("cpu", tmp_path) == 260 * 2**20


def test_emptying_the_caches_writes_twice_what_the_last_one_holds() -> None:
    buffer = evictor("cpu")()
    assert isinstance(buffer, torch.Tensor)
    assert buffer.nbytes == 2 * cache_bytes("cpu")
    assert bool((buffer == 1).all())
