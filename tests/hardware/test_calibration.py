import math
from dataclasses import replace

import pytest
import torch

from napkin.errors import NapkinError
from napkin.hardware.calibration import (
    ArrayMeasurement,
    Calibration,
    CalibrationSettings,
    Machine,
    MatmulMeasurement,
    better_of,
    comparable,
)
from napkin.hardware.calibration_cache import calibrate
from napkin.hardware.competition import Watch
from napkin.hardware.conditions import Conditions
from napkin.machine_code.processor import has_native_bf16
from oracles.clock import ProcessorClock

TINY = CalibrationSettings(
    shapes=((64, 64, 64), (128, 32, 64)), array_bytes=(2**14, 2**20), seconds=0.02, visit_seconds=0.001
)
QUIET, BUSY = Conditions(2, 2, 0.0), Conditions(2, 2, 1.9)
MACHINE = Machine("cpu", "Slide Rule", 2, 2, False, "2.13.0")


def calibration_of(matmuls: list[tuple[int, int, int, float]], arrays: list[tuple[int, float, float]]) -> Calibration:
    return Calibration(
        MACHINE,
        "2026-01-01T00:00:00+00:00",
        tuple(MatmulMeasurement("fp32", m, n, k, rate) for m, n, k, rate in matmuls),
        tuple(ArrayMeasurement(*array) for array in arrays),
        1e-6,
        0.0,
    )


def test_a_calibration_measures_every_shape_and_size_in_every_native_format():
    told: list[float] = []
    calibration = calibrate(settings=TINY, progress=told.append)
    assert calibration.formats == (("fp32", "bf16") if has_native_bf16() else ("fp32",))
    assert len(calibration.matmuls) == len(TINY.shapes) * len(calibration.formats)
    assert [array.array_bytes for array in calibration.arrays] == list(TINY.array_bytes)
    # Looser than any machine that runs torch is slow or fast.
    assert 1e6 < calibration.matmul_peak("fp32") < 1e15
    assert 1e6 < calibration.memory_bandwidth < 1e14
    assert 1e-8 < calibration.seconds_per_operator < 1
    assert calibration.machine.threads == torch.get_num_threads()
    assert told == sorted(told)
    assert told[-1] == 1


def test_calibrating_changes_neither_random_numbers_nor_precision():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        calibrate(settings=TINY)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(precision)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(NapkinError, match=r"torch.*device"):
        calibrate("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_is_measured_in_its_formats():
    calibration = calibrate("cuda", settings=TINY)
    assert calibration.machine.device_name == torch.cuda.get_device_name()
    assert {"fp32", "fp16"} <= set(calibration.formats)
    assert calibration.seconds_per_fresh_byte == 0


def test_an_unknown_device_is_refused():
    with pytest.raises(NapkinError, match=r"'abacus'.*calibrated: use"):
        calibrate("abacus")


def test_rates_of_unseen_shapes_follow_the_law_of_the_measured_ones():
    flat, per_m, per_n, per_k, call = 1e-11, 3e-10, 2e-10, 8e-10, 5e-6

    def law(m: int, n: int, k: int) -> float:
        return 1 / (flat + per_m / m + per_n / n + per_k / k + call / (m * n * k))

    shapes = [(256, 256, 256), (4096, 64, 512), (64, 2048, 128), (1024, 1024, 16), (8, 512, 512), (8192,) * 3]
    calibration = calibration_of([(*shape, law(*shape)) for shape in shapes], [(2**16, 1e9, 1e9)])
    for shape in [(1, 1024, 1024), (4096, 1024, 256), (17, 33, 65), (100, 5000, 300)]:
        assert calibration.matmul_rate("float32", *shape) == pytest.approx(law(*shape), rel=1e-6)


def test_rates_never_exceed_the_peak_and_thin_products_never_exceed_thick_ones():
    measured = [(256, 256, 256, 9e10), (1024, 1024, 1024, 1.1e11), (2048, 2048, 2048, 1e11), (64, 64, 64, 5e10)]
    calibration = calibration_of([*measured, (1, 1024, 1024, 8e9)], [(2**16, 1e9, 1e9)])
    assert calibration.matmul_peak("fp32") == 1.1e11
    for thick in (10**6, 4096, 300):
        rates = [calibration.matmul_rate("fp32", m, thick, thick) for m in (1, 2, 5, 30, 200, 10**7)]
        assert rates == sorted(rates)
        assert 0 < rates[0] <= rates[-1] <= 1.1e11


def test_even_one_measured_shape_gives_a_rate():
    calibration = calibration_of([(512, 512, 512, 1e11)], [(2**16, 1e9, 1e9)])
    assert calibration.matmul_rate("fp32", 512, 512, 512) == pytest.approx(1e11)


def test_bandwidth_lies_between_the_measured_sizes_and_is_flat_beyond_them():
    calibration = calibration_of([(8, 8, 8, 1e9)], [(2**20, 4e10, 9e10), (2**26, 1e10, 1e10)])
    assert calibration.bandwidth(1) == pytest.approx(6e10)
    assert calibration.bandwidth(2.5 * 2**20) == pytest.approx(6e10)
    assert calibration.bandwidth(2.5 * 2**23) == pytest.approx(3.5e10)
    assert calibration.bandwidth(math.inf) == calibration.memory_bandwidth == pytest.approx(1e10)


def test_formats_that_were_not_measured_and_empty_products_are_refused():
    calibration = calibration_of([(8, 8, 8, 1e9)], [(2**16, 1e9, 1e9)])
    with pytest.raises(NapkinError, match=r"multiply e4m3 matrices.*choose.*fp32"):
        calibration.matmul_peak("e4m3")
    with pytest.raises(NapkinError, match="0 × 8 × 8 is empty"):
        calibration.matmul_rate("fp32", 0, 8, 8)


def test_products_of_8_bits_that_were_not_measured_are_expected_to_be_as_fast_as_those_of_bf16():
    calibration = calibration_of([(512, 512, 512, 1e11)], [(2**16, 1e9, 1e9)])
    wide = replace(calibration.matmuls[0], format="bf16", flops_per_second=3e11)
    calibration = replace(calibration, matmuls=(*calibration.matmuls, wide))
    for name in ("int8", "fp8-e4m3"):
        assert calibration.matmul_rate(name, 512, 512, 512) == pytest.approx(3e11)
    measured = replace(wide, format="int8", flops_per_second=5e11)
    calibration = replace(calibration, matmuls=(*calibration.matmuls, measured))
    assert calibration.matmul_rate("int8", 512, 512, 512) == pytest.approx(5e11)


def test_emulated_products_are_at_most_as_fast_as_those_that_they_are_made_of():
    calibration = calibration_of([(8, 8, 8, 1e9)], [(2**16, 1e9, 1e9)])
    assert calibration.matmul_peak("bf16") == calibration.matmul_peak("fp32") == 1e9
    fast = replace(calibration.matmuls[0], format="bf16", flops_per_second=4e9)
    assert replace(calibration, matmuls=(*calibration.matmuls, fast)).matmul_peak("bf16") == 4e9


@pytest.mark.parametrize("others", [1, 7])
def test_a_calibration_beside_other_processes_has_the_rates_of_a_quiet_one(others: int, monkeypatch) -> None:
    def calibration(conditions: Conditions, others: int) -> Calibration:
        monkeypatch.setattr("napkin.hardware.timing.time", ProcessorClock(1e-3, others=others))
        monkeypatch.setattr(Watch, "conditions", lambda self, **_: conditions)
        return calibrate(settings=TINY)

    quiet, busy = calibration(QUIET, 0), calibration(BUSY, others)
    assert (quiet.disturbed, busy.disturbed) == (False, True)
    assert [each.flops_per_second for each in busy.matmuls] == pytest.approx(
        [each.flops_per_second for each in quiet.matmuls]
    )
    assert quiet.matmuls[0].flops_per_second == pytest.approx(2 * 64**3 / 1e-3)
    assert busy.arrays[0].copy_bytes_per_second == pytest.approx(quiet.arrays[0].copy_bytes_per_second)
    assert busy.conditions == BUSY


def test_the_faster_measurement_of_each_thing_is_kept_when_two_calibrations_are_joined():
    first = calibration_of([(8, 8, 8, 1e9), (9, 9, 9, 5e9)], [(2**16, 1e9, 7e9)])
    second = calibration_of([(8, 8, 8, 2e9), (9, 9, 9, 4e9)], [(2**16, 3e9, 6e9)])
    joined = better_of(replace(first, seconds_per_operator=1e-7), second)
    assert [matmul.flops_per_second for matmul in joined.matmuls] == [2e9, 5e9]
    assert joined.arrays == (ArrayMeasurement(2**16, 3e9, 7e9),)
    assert joined.seconds_per_operator == 1e-7
    assert comparable(first, joined)
    assert not comparable(first, calibration_of([(8, 8, 8, 1e9)], [(2**16, 1e9, 7e9)]))


def test_of_a_quiet_and_a_disturbed_calibration_the_quiet_one_is_kept_whichever_is_faster():
    quiet = replace(calibration_of([(8, 8, 8, 1e9)], [(2**16, 1e9, 1e9)]), conditions=QUIET)
    busy = replace(calibration_of([(8, 8, 8, 2e9)], [(2**16, 2e9, 2e9)]), conditions=BUSY)
    assert (quiet.disturbed, busy.disturbed) == (False, True)
    assert better_of(quiet, busy) == better_of(busy, quiet) == quiet
    assert better_of(busy, replace(busy, measured_at="later")).disturbed
