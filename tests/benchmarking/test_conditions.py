"""What is recorded beside a measurement is what the system says, and nothing where it says nothing."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from napkin.benchmarking import conditions
from napkin.benchmarking.conditions import Waited, moment


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(conditions, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(conditions, "_LOADAVG", tmp_path / "loadavg")
    return tmp_path


def test_clock_and_load_are_read_from_the_system(proc: Path) -> None:
    nothing = moment("cpu")
    assert (nothing.megahertz, nothing.load, nothing.gpu) == (None, None, None)
    (proc / "cpuinfo").write_text("processor\t: 0\ncpu MHz\t\t: 2400.5\n\nprocessor\t: 1\ncpu MHz\t\t: 3600.5\n")
    (proc / "loadavg").write_text("1.25 0.50 0.25 3/411 998\n")
    now = moment("cpu")
    assert (now.megahertz, now.load, now.gpu) == (3000.5, 1.25, None)


def test_a_gpus_fields_are_those_that_nvidia_smi_prints(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(proc))
    assert moment("cuda").gpu is None
    program = proc / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '1980 MHz, 2619 MHz, 1980 MHz, 41, 120.5 W, 3 %'\n")
    program.chmod(0o755)
    found = moment("cuda").gpu
    assert found is not None
    assert (found["clocks.sm"], found["power.draw"], found["utilization.gpu"]) == ("1980 MHz", "120.5 W", "3 %")
    program.write_text("#!/bin/sh\necho 'no devices were found'; exit 6\n")
    assert moment("cuda").gpu is None


@pytest.mark.parametrize(("told", "share"), [((1.0, 4.0), 0.3), ((None, None), None), ((4.0, 1.0), 0.0)])
def test_waiting_is_a_share_of_all_threads_time(
    told: tuple[float | None, float | None], share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings, seconds = iter(told), iter((100.0, 105.0))
    monkeypatch.setattr(conditions, "seconds_waited", lambda: next(readings))
    monkeypatch.setattr(conditions, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with Waited() as waited:
        pass
    assert waited.share == (None if share is None else pytest.approx(share))
