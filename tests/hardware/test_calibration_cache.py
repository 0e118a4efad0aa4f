import dataclasses
import json
from pathlib import Path

import pytest
import torch

from napkin.hardware import competition
from napkin.hardware.calibration import Calibration, CalibrationSettings
from napkin.hardware.calibration_cache import (
    calibrate,
    calibration_of_this_machine,
    calibration_path,
    load_calibration,
    save_calibration,
)
from napkin.hardware.competition import Watch
from napkin.hardware.conditions import Conditions

TINY = CalibrationSettings(shapes=((16, 16, 16),), array_bytes=(2**14,), seconds=0.01, visit_seconds=0.001)


@pytest.fixture(scope="module")
def measured() -> Calibration:
    return dataclasses.replace(calibrate(settings=TINY), conditions=Conditions(2, 2, 0.0))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Whatever else runs beside the tests.
    monkeypatch.setattr(Watch, "conditions", lambda self, **_: Conditions(2, 2, 0.0))
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_saved_is_loaded(measured: Calibration, cache: Path):
    assert load_calibration() is None
    path = save_calibration(measured)
    assert path.parent == cache
    assert load_calibration() == measured
    assert list(cache.iterdir()) == [path]


def test_a_kept_calibration_is_not_measured_again(measured: Calibration):
    marked = dataclasses.replace(measured, measured_at="long ago", conditions=None)
    save_calibration(marked)
    assert calibration_of_this_machine(settings=TINY) == marked


@pytest.mark.parametrize("busy", [False, True])
def test_a_disturbed_calibration_is_measured_again_at_the_next_quiet_start(
    measured: Calibration, busy: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(competition, "is_busy_now", lambda: busy)
    monkeypatch.setattr(competition, "_asked", set())
    disturbed = dataclasses.replace(measured, measured_at="long ago", conditions=Conditions(2, 2, 1.9))
    save_calibration(disturbed)
    found = calibration_of_this_machine(settings=TINY)
    assert (found == disturbed) is busy
    assert load_calibration() == found
    # The same process does not ask again.
    save_calibration(disturbed)
    assert calibration_of_this_machine(settings=TINY) == disturbed


def test_a_new_calibration_is_kept():
    first = calibration_of_this_machine(settings=TINY)
    assert load_calibration() == first
    assert calibration_of_this_machine(settings=TINY) == first


def test_measuring_again_never_makes_a_kept_figure_slower(measured: Calibration):
    fast = dataclasses.replace(measured.matmuls[0], flops_per_second=1e18)
    save_calibration(dataclasses.replace(measured, matmuls=(fast, *measured.matmuls[1:])))
    again = calibration_of_this_machine(again=True, settings=TINY)
    assert again.matmuls[0] == fast
    assert again.measured_at >= measured.measured_at
    assert load_calibration() == again


def test_measuring_other_things_again_replaces_what_was_kept(measured: Calibration):
    fast = dataclasses.replace(measured.matmuls[0], m=17, flops_per_second=1e18)
    save_calibration(dataclasses.replace(measured, matmuls=(fast, *measured.matmuls[1:])))
    again = calibration_of_this_machine(again=True, settings=TINY)
    assert again.matmuls[0].flops_per_second < 1e18
    assert load_calibration() == again


def corrupt(text: str) -> dict[str, bytes]:
    good = json.loads(text)
    altered = {
        "a negative rate": {**good, "seconds_per_operator": -1.0},
        "no matrix products": {**good, "matmuls": []},
        "a missing field": {name: value for name, value in good.items() if name != "arrays"},
        "a number as text": {**good, "seconds_per_fresh_byte": "0"},
        "another version": {**good, "version": 3},
        "one of before, which may have been disturbed": {**good, "version": 1, "waiting_share": 0.4},
        "another machine": {**good, "machine": {**good["machine"], "device_name": "another"}},
        "a list": [good],
    }
    return {
        "nothing": b"",
        "half a file": text.encode()[: len(text) // 2],
        "bytes that are not text": b"\xff\xfe\x00" * 50,
        "an infinite rate": text.replace('"seconds_per_operator": ', '"seconds_per_operator": 1e999, "": ').encode(),
        **{name: json.dumps(value).encode() for name, value in altered.items()},
    }


def test_a_corrupt_or_foreign_file_is_ignored_and_replaced(measured: Calibration):
    path = save_calibration(measured)
    for damage, data in corrupt(path.read_text()).items():
        path.write_bytes(data)
        assert load_calibration() is None, damage
        again = calibration_of_this_machine(settings=TINY)
        assert load_calibration() == again, damage


def test_another_number_of_threads_is_another_machine(measured: Calibration):
    save_calibration(measured)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert load_calibration() is None
    finally:
        torch.set_num_threads(threads)
    assert load_calibration() == measured


def test_a_cache_that_cannot_be_written_costs_a_warning_and_nothing_else(cache: Path):
    cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="cannot be cached"):
        calibration = calibration_of_this_machine(settings=TINY)
    assert calibration.matmul_peak("fp32") > 0
    assert cache.read_text() == "a file where the folder should be"


def test_the_file_is_named_after_the_machine(measured: Calibration):
    other = dataclasses.replace(measured.machine, torch_version="0")
    assert calibration_path(other) != calibration_path(measured.machine)
    assert calibration_path(measured.machine).name.startswith("calibration-")
