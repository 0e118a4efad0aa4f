"""What other processes do is seen, told, and taken out of what is timed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from napkin.hardware import competition
from napkin.hardware.competition import Sample, Sampler, Watch, agree, fastest_tenth, is_quiet_start
from napkin.hardware.conditions import Conditions
from napkin.hardware.timing import processor_seconds
from oracles.clock import ProcessorClock

QUIET, BUSY = Conditions(2, 2, 0.0, lost=0.02), Conditions(2, 2, 1.9, waited=0.5, lost=0.5)


@pytest.mark.parametrize(
    ("conditions", "crowded", "busy"),
    [
        (QUIET, 0.0, False),
        (BUSY, 1.9, True),
        (Conditions(2, 2, 0.1), 0.1, False),
        # Eight of sixteen cores are enough for eight threads, whatever eight others do.
        (Conditions(16, 8, 8.0), 0.0, False),
        (Conditions(16, 8, 12.0), 4.0, True),
        # A neighbour of the virtual machine; a quota that other processes use up.
        (Conditions(4, 4, 1.0, stolen=1.0), 1.0, True),
        (Conditions(4, 4, 0.0, lost=0.5), 0.0, True),
        (Conditions(4, 4, 0.0, waited=0.2), 0.0, True),
        # More threads than cores wait for each other, whoever else is there.
        (Conditions(2, 8, 0.0, waited=0.7, lost=0.7), 0.0, False),
    ],
)
def test_a_machine_is_busy_where_other_processes_take_cores_that_threads_need(
    conditions: Conditions, crowded: float, busy: bool
) -> None:
    assert conditions.crowded == pytest.approx(crowded)
    assert conditions.busy is busy


def test_what_makes_a_machine_busy_is_told_with_its_figure() -> None:
    assert "1.9 of 2 cores" in BUSY.describe()
    assert "20%" in Conditions(4, 4, 0.0, waited=0.2).describe()
    assert "50%" in Conditions(4, 4, 0.0, lost=0.5).describe()


def test_a_watch_sees_the_processor_time_of_another_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            process = psutil.Process(spinning.pid)
            watch, before = Watch(), process.cpu_times()
            deadline = time.monotonic() + 30
            while process.cpu_times().user - before.user < 0.2 and time.monotonic() < deadline:
                time.sleep(0.01)
            after, seconds = process.cpu_times(), watch.seconds
            seen = watch.conditions(idle=True).others * seconds
        finally:
            spinning.kill()
    # The system's clocks tick every 10 ms.
    assert seen >= after.user - before.user - 0.05


def test_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's clocks go on by what this process does, and by a second of others."""
    core = psutil.cpu_times(percpu=True)[0]
    begin = time.process_time()

    def times(percpu: bool) -> list:
        return [core._replace(user=core.user + time.process_time() - begin + others)]

    others = 0.0
    monkeypatch.setattr(competition.psutil, "cpu_times", times)
    monkeypatch.setattr(competition, "_own_cores", lambda cores: cores)
    watch = Watch()
    sum(range(10**6))
    assert watch.conditions().others * watch.seconds < 0.1
    others = 1.0
    earlier, seen, later = watch.seconds, watch.conditions().others, watch.seconds
    assert seen * later > 0.95
    assert seen * earlier < 1.05


def test_a_call_that_waits_takes_no_processor_time() -> None:
    clock, processor = processor_seconds(lambda: time.sleep(0.05))
    assert clock >= 0.05
    assert clock - processor >= 0.04


def test_the_fastest_tenth_and_its_agreement() -> None:
    assert fastest_tenth([3.0, 1.0, 2.0]) == 1.0
    assert fastest_tenth([float(number) for number in range(30, 0, -1)]) == 3.0
    assert not agree([1.0, 1.0])
    assert agree([1.04, 1.0, 9.0])
    assert not agree([1.06, 1.0, 9.0])
    assert agree([1.0, 1.01, 1.02, *[5.0] * 27])
    assert not agree([1.0, 1.01, 1.2, *[5.0] * 27])


@pytest.mark.parametrize("others", [0, 1, 4])
def test_a_sample_beside_other_processes_is_what_it_is_without_them(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("napkin.hardware.timing.time", ProcessorClock(0.125, others=others))
    monkeypatch.setattr(Watch, "conditions", lambda self, **_: BUSY if others else QUIET)
    with Sampler() as sampler:
        samples = [sampler.sample(lambda: None) for _ in range(5)]
        conditions = sampler.conditions()
    assert conditions is not None
    assert conditions.busy is (others > 0)
    assert [sample.clock for sample in samples] == [0.125 * (1 + others)] * 5
    assert sampler.seconds(samples) == sampler.fastest(samples) == 0.125
    assert sampler.undisturbed(samples) == [0.125] * 5


def test_what_most_samples_say_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = iter([False, False, True])
    monkeypatch.setattr(competition, "is_busy_now", lambda: False)
    monkeypatch.setattr(Watch, "conditions", lambda self, **_: BUSY if next(verdicts) else QUIET)
    sampler = Sampler(window=0.0)
    with sampler:
        for _ in range(2):
            sampler.sample(lambda: None)
    quiet = [Sample(seconds, 0.5, window=0) for seconds in (1.0, 2.0, 6.0)]
    busy = [Sample(9.0, seconds, window=2) for seconds in (0.9, 0.8, 0.7, 0.6)]
    assert sampler.seconds([*quiet, *busy[:3]]) == 2.0
    assert sampler.seconds([*quiet, *busy]) == 0.5
    assert sampler.fastest([*quiet, *busy]) == 1.0
    assert sampler.fastest(busy) == 0.6
    assert sampler.undisturbed([quiet[0], busy[0]]) == [1.0, 0.9]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")
def test_threads_that_keep_others_from_spinning_end_with_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(competition, "is_busy_now", lambda: True)
    threads, before = torch.get_num_threads(), set(os.listdir("/proc/self/task"))
    torch.set_num_threads(2)
    try:
        torch.zeros(2**18).add_(1)
        own = set(os.listdir("/proc/self/task"))
        with Sampler() as sampler:
            assert sampler.busy
            assert len(set(os.listdir("/proc/self/task")) - own) >= 1
        assert not sampler.busy
        deadline = time.monotonic() + 30
        while not set(os.listdir("/proc/self/task")) <= own | before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("busy", [False, True])
def test_a_process_starts_once(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(competition, "is_busy_now", lambda: busy)
    monkeypatch.setattr(competition, "_asked", set())
    assert is_quiet_start("cpu") is not busy
    assert is_quiet_start("cpu") is False
    assert is_quiet_start("2 ranks") is not busy


def test_threads_sleep_in_inference_mode_too() -> None:
    """The thread of the sleeping team is not in it: a tensor that was made in it may not be changed there."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            team = competition._SleepingTeam()
        team.end()
        assert not team._thread.is_alive()
    finally:
        torch.set_num_threads(threads)
