"""The ranks of this machine are measured by real processes, once, and a plan reads their seconds between the sizes."""

import pytest
import torch

from napkin.hardware.calibration import Machine
from napkin.hardware.cluster import Group
from napkin.hardware.microbenchmarks import current_machine
from napkin.hardware.rank_calibration import CollectiveMeasurement, RankCalibration, ranks_of_this_machine

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
MACHINE = Machine("cpu", "Slide Rule", 2, 1, False, "2.13.0")
FOUR = RankCalibration(
    MACHINE,
    4,
    1.5,
    tuple(
        CollectiveMeasurement(name, size, 1e-4 + size / 1e9) for name in OPERATIONS for size in (10**3, 10**6, 10**7)
    ),  # pyright: ignore[reportArgumentType]
)


@pytest.mark.torture
def test_two_ranks_are_measured_once_and_cached(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        machine = current_machine("cpu")
        measured = ranks_of_this_machine(machine, 2)
    finally:
        torch.set_num_threads(threads)
    assert measured is not None
    assert {each.operation for each in measured.collectives} == set(OPERATIONS)
    assert measured.contention >= 1
    (file,) = tmp_path.glob("ranks-*.json")
    written = file.stat()
    assert ranks_of_this_machine(machine, 2) == measured
    assert file.stat().st_mtime_ns == written.st_mtime_ns


def test_processes_that_fail_are_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.warns(UserWarning, match="could not be measured: exit status 1"):
        assert ranks_of_this_machine(MACHINE, 2) is None


def test_seconds_are_those_measured_and_grow_with_bytes_and_ranks() -> None:
    interconnect, all_of_them = FOUR.interconnect, Group(4)
    for name in OPERATIONS:
        for size in (10**3, 10**6, 10**7):
            assert interconnect.seconds(name, size, all_of_them) == pytest.approx(1e-4 + size / 1e9)  # pyright: ignore[reportArgumentType]
    between = [interconnect.seconds("all_reduce", size, all_of_them) for size in (10, 10**4, 10**5, 10**8)]
    assert between == sorted(between)
    assert between[-1] == pytest.approx(10 * (1e-4 + 1e-2))
    assert interconnect.seconds("all_reduce", 10**6, Group(1)) == 0
    # Two ranks send 1/2 of the bytes each, four 3/4.
    two = interconnect.seconds("all_gather", 10**6, Group(2))
    assert two == pytest.approx(interconnect.seconds("all_gather", 10**6, all_of_them) * (1 / 2) / (3 / 4))
