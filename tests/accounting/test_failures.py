"""Failures: the formulas against runs that are simulated failure by failure, and against published figures."""

import math

import numpy as np
import pytest

from napkin.accounting.failures import (
    DEVICE_HOURS_PER_FAILURE,
    NEARLY_BEST,
    FailureModel,
    daly_interval,
    failure_model,
    mtbf_of_devices,
    young_interval,
)

HOUR = 3600.0


def simulated_seconds(model: FailureModel, interval: float, n_segments: int, n_runs: int) -> np.ndarray:
    """Wall-clock seconds of runs of so many segments of work, each followed by a checkpoint."""
    generator = np.random.default_rng(0)
    # When the checkpoints become durable in a life without a failure.
    durable, copied, written = [], 0.0, 0.0
    for _ in range(n_segments):
        copied = max(copied + interval, written) + model.pause_seconds
        written = copied + model.write_seconds
        durable.append(written)
    times = np.array(durable)
    elapsed, kept = np.zeros(n_runs), np.zeros(n_runs, dtype=int)
    starting, running = np.zeros(n_runs), np.ones(n_runs, dtype=bool)
    while running.any():
        until_failure = generator.exponential(model.mtbf_seconds, n_runs)
        needed = starting + times[n_segments - 1 - np.minimum(kept, n_segments - 1)]
        ends = running & (until_failure >= needed)
        elapsed += np.where(running, np.minimum(until_failure, needed), 0)
        kept += np.where(running, np.searchsorted(times, until_failure - starting, side="right"), 0)
        running &= ~ends
        starting[:] = model.restart_seconds
    return elapsed


@pytest.mark.parametrize(
    ("mtbf", "pause", "write", "restart", "interval"),
    [
        (3.09 * HOUR, 5.0, 0.0, 600.0, 300.0),
        (3.09 * HOUR, 5.0, 60.0, 600.0, 300.0),
        (3.09 * HOUR, 5.0, 0.0, 600.0, 2 * HOUR),
        (24 * HOUR, 300.0, 0.0, 600.0, 117 * 60.0),
        (1 * HOUR, 120.0, 300.0, 0.0, 600.0),
        (1 * HOUR, 0.1, 590.0, 1800.0, 600.0),
        (0.5 * HOUR, 360.0, 0.0, 900.0, 900.0),
    ],
)
def test_the_expected_time_is_that_of_simulated_runs(
    mtbf: float, pause: float, write: float, restart: float, interval: float
) -> None:
    model, n_segments = FailureModel(mtbf, pause, write, restart), 150
    simulated = simulated_seconds(model, interval, n_segments, n_runs=3000)
    # The first checkpoint has no earlier one whose write goes on beside its work.
    first = mtbf * math.exp(restart / mtbf) * math.expm1(write / mtbf)
    expected = model.expected_seconds(n_segments * interval, interval) + first
    error = simulated.std() / math.sqrt(len(simulated))
    assert abs(simulated.mean() - expected) < 3 * error
    # So narrow that neither R, C nor W could be missing.
    assert error < 0.006 * expected


def test_a_write_longer_than_the_interval_makes_the_next_checkpoint_wait() -> None:
    model = FailureModel(4 * HOUR, 5.0, 300.0, 600.0)
    simulated = simulated_seconds(model, 60.0, 400, n_runs=1000).mean()
    assert simulated == pytest.approx(model.expected_seconds(400 * 60.0, 60.0), rel=0.02)
    assert simulated > 4 * 400 * 60


def brute_force_interval(model: FailureModel) -> tuple[float, float]:
    """The best of many intervals, and what a second of work takes with it."""
    low, best, high = 1e-5 * model.mtbf_seconds, 0.0, 4 * model.mtbf_seconds
    for _ in range(4):
        intervals = np.geomspace(low, high, 500).tolist()
        found = int(np.argmin([model.expected_seconds(1.0, interval) for interval in intervals]))
        low, best, high = intervals[found - 1 : found + 2]
    return best, model.expected_seconds(1.0, best)


@pytest.mark.parametrize("pause", [1e-5, 1e-3, 0.01, 0.1, 0.3])
def test_dalys_interval_is_the_best_of_all(pause: float) -> None:
    mtbf = 10_000.0
    model = FailureModel(mtbf, pause * mtbf, 0.0, 600.0)
    best, seconds = brute_force_interval(model)
    assert daly_interval(pause * mtbf, mtbf) == pytest.approx(best, rel=0.0025)
    assert model.expected_seconds(1.0, model.best_interval) <= seconds * (1 + 2e-6)
    # Young's is too long by about 2/3·C.
    assert young_interval(pause * mtbf, mtbf) - best == pytest.approx(pause * mtbf * 2 / 3, rel=0.08)


@pytest.mark.parametrize(("mtbf_hours", "minutes"), [(24, "117"), (6, "57"), (0.25, "9.1")])
def test_dalys_interval_is_that_of_his_figures(mtbf_hours: float, minutes: str) -> None:
    # Daly 2006, figures 3 to 5: a checkpoint takes 5 minutes.
    found = daly_interval(300.0, mtbf_hours * HOUR) / 60
    assert f"{found:.{1 if '.' in minutes else 0}f}" == minutes


def test_long_checkpoints_have_an_interval_that_is_nearly_the_best() -> None:
    for pause, excess in ((1.0, 2e-4), (2.0, 1.5e-3), (3.0, 1.5e-3)):
        model = FailureModel(HOUR, pause * HOUR)
        assert model.expected_seconds(1.0, model.best_interval) <= brute_force_interval(model)[1] * (1 + excess)
    assert daly_interval(2 * HOUR, HOUR) == daly_interval(3 * HOUR, HOUR) == HOUR


def test_checkpoints_come_no_faster_than_they_are_written() -> None:
    model = FailureModel(3 * HOUR, 0.01, 60.0, 600.0)
    best, seconds = brute_force_interval(model)
    assert daly_interval(0.01, 3 * HOUR) < 15
    assert model.best_interval == 60
    assert best == pytest.approx(60, rel=0.001)
    assert model.expected_seconds(1.0, 60.0) == pytest.approx(seconds, rel=1e-4)


@pytest.mark.parametrize("pause", [0.005, 5.0, 500.0])
def test_the_longest_interval_costs_one_percent_more_than_the_best(pause: float) -> None:
    model = FailureModel(3 * HOUR, pause, 10.0, 600.0)
    best, longest = model.expected_seconds(1.0, model.best_interval), model.longest_interval
    assert longest > model.best_interval
    assert model.expected_seconds(1.0, longest) == pytest.approx((1 + NEARLY_BEST) * best)


def test_the_llama_3_run_was_interrupted_every_three_hours() -> None:
    mtbf = mtbf_of_devices(16_384)
    assert mtbf / HOUR == pytest.approx(3.1, abs=0.05)
    assert 54 * 24 * HOUR / mtbf == pytest.approx(419)
    assert pytest.approx(50_677, abs=0.1) == DEVICE_HOURS_PER_FAILURE
    assert mtbf_of_devices(8) == 2048 * mtbf
    # "more than 90% effective training time"; 4 GB per device at most are copied, every 15 minutes.
    run = failure_model(n_devices=16_384, copied_bytes=4e9, written_bytes=16_384 * 4e9, writing_nodes=2048)
    assert 0.9 < run.goodput(900.0) < 0.95


def test_without_failures_only_the_pauses_are_lost() -> None:
    model = FailureModel(1e15, 10.0, 5.0, 600.0)
    assert model.goodput(90.0) == pytest.approx(0.9)
    assert FailureModel(1e15, 0.0).goodput(90.0) == pytest.approx(1)


def test_a_run_that_fails_sooner_than_it_restarts_never_ends() -> None:
    model = FailureModel(0.1, 1.0, 0.0, 600.0)
    assert model.expected_seconds(1e6, 10.0) == math.inf
    assert model.goodput(10.0) == 0
    assert model.longest_interval == model.best_interval > 0


def test_training_waits_for_the_copy_or_for_the_write() -> None:
    sizes = {"n_devices": 16, "copied_bytes": 5e9, "written_bytes": 80e9, "writing_nodes": 2}
    behind = failure_model(**sizes, host_bandwidth=50e9)
    assert (behind.pause_seconds, behind.write_seconds, behind.restart_seconds) == (0.1, 40.0, 600.0)
    waiting = failure_model(**sizes, background=False, mtbf_hours=5.0, restart_minutes=2.0)
    assert (waiting.pause_seconds, waiting.write_seconds) == (40.0, 0.0)
    assert (waiting.mtbf_seconds, waiting.restart_seconds) == (5 * HOUR, 120.0)
    # Less is lost with the copy, as long as a write takes a small part of the time between failures.
    assert behind.goodput(600.0) > failure_model(**sizes, background=False).goodput(600.0)
