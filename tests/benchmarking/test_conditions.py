"""What is recorded beside a measurement is what the system says, and nothing where it says nothing."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from napkin.benchmarking import measuring
from napkin.benchmarking.measuring import Waited, moment


def test_clock_and_load_are_those_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def does_not_tell() -> None:
        raise OSError("no such file")

    monkeypatch.setattr(psutil, "cpu_freq", lambda: None)
    monkeypatch.setattr(psutil, "getloadavg", does_not_tell)
    assert moment("cpu") == {"megahertz": None, "load": None, "gpu": None}
    monkeypatch.setattr(psutil, "cpu_freq", does_not_tell)
    assert moment("cpu")["megahertz"] is None
    monkeypatch.setattr(psutil, "cpu_freq", lambda: SimpleNamespace(current=3000.5))
    monkeypatch.setattr(psutil, "getloadavg", lambda: (1.25, 0.5, 0.25))
    assert moment("cpu") == {"megahertz": 3000.5, "load": 1.25, "gpu": None}


def test_a_gpus_fields_are_those_that_nvidia_smi_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert moment("cuda")["gpu"] is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '1980 MHz, 2619 MHz, 1980 MHz, 41, 120.5 W, 3 %'\n")
    program.chmod(0o755)
    found = moment("cuda")["gpu"]
    assert found is not None
    assert (found["clocks.sm"], found["power.draw"], found["utilization.gpu"]) == ("1980 MHz", "120.5 W", "3 %")
    program.write_text("#!/bin/sh\necho 'no devices were found'; exit 6\n")
    assert moment("cuda")["gpu"] is None


@pytest.mark.parametrize(("told", "share"), [((1.0, 4.0), 0.3), ((None, None), None), ((4.0, 1.0), 0.0)])
def test_waiting_is_a_share_of_all_threads_time(
    told: tuple[float | None, float | None], share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings, seconds = iter(told), iter((100.0, 105.0))
    monkeypatch.setattr(measuring, "seconds_waited", lambda: next(readings))
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with Waited() as waited:
        pass
    assert waited.share == (None if share is None else pytest.approx(share))
