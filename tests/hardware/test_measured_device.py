from pathlib import Path

import pytest

from napkin.errors import NapkinError
from napkin.hardware.calibration import ArrayMeasurement, Calibration, Machine, MatmulMeasurement
from napkin.hardware.ceilings import CatalogueCeilings, efficiencies, efficiency_of
from napkin.hardware.device_file import find_device
from napkin.hardware.measured_device import measured_device
from napkin.model.config import ModelConfig
from napkin.planning.planner import plan
from napkin.recipe.recipe import Recipe

H100 = find_device("H100")
SHARE, WIDTH = 0.71, 130.0
SHAPES = ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192), (16384, 1024, 4096), (1, 4096, 4096))


def calibration(device_name: str, *, device_type: str = "cuda", bandwidth: float = 2.5e12) -> Calibration:
    """Of a device whose products follow the model of `CatalogueCeilings.matmul_rate`; the thin one is slow."""
    peak = H100.peak("bf16")
    rates = [SHARE * peak / (1 + WIDTH * sum(1 / side for side in shape)) for shape in SHAPES[:-1]]
    return Calibration(
        machine=Machine(device_type, device_name, 1, 1, True, "2.13"),
        measured_at="2026-11-22T00:00:00+00:00",
        matmuls=tuple(
            MatmulMeasurement("bf16", *shape, rate) for shape, rate in zip(SHAPES, [*rates, 1e9], strict=True)
        ),
        arrays=(ArrayMeasurement(2**29, bandwidth, bandwidth),),
        seconds_per_operator=3e-6,
        seconds_per_fresh_byte=0.0,
    )


def test_a_plan_on_a_measured_gpu_has_its_coefficients_in_place_of_the_published_ones(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(measured_device(calibration("NVIDIA H100 80GB HBM3")))
    device = find_device(path)
    used, published = efficiency_of(device), efficiencies()["hopper"]
    assert used.matmul_share == pytest.approx(SHARE, rel=1e-3)
    assert used.matmul_width == pytest.approx(WIDTH, rel=1e-3)
    assert used.memory_share == pytest.approx(2.5 / 3.35, rel=1e-3)
    assert used.kernel_seconds == 3e-6
    assert (used.attention_share, used.link_share) == (published.attention_share, published.link_share)
    assert (device.memory_bytes, device.link_bandwidth, device.peaks) == (
        H100.memory_bytes,
        H100.link_bandwidth,
        H100.peaks,
    )
    for m, n, k in ((2048, 2048, 2048), (8192, 1024, 512)):
        expected = SHARE * H100.peak("bf16") / (1 + WIDTH * (1 / m + 1 / n + 1 / k))
        assert CatalogueCeilings(device).matmul_rate("bf16", m, n, k) == pytest.approx(expected, rel=1e-3)
    recipe = Recipe(model=ModelConfig(vocab_size=512, context_length=64, d_model=64, n_layers=1))
    measured, by_name = plan(recipe, on=str(path)), plan(recipe, on="H100")
    assert measured.ledger == by_name.ledger
    assert measured.seconds_per_step < by_name.seconds_per_step
    assert not measured.site.measured


def test_a_cpu_describes_itself_by_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "cpu.toml"
    path.write_text(measured_device(calibration("a CPU that no catalogue has", device_type="cpu", bandwidth=2e10)))
    device = find_device(path)
    assert (device.torch_device, device.memory_bandwidth) == ("cpu", 2e10)
    assert efficiency_of(device).memory_share == 1
    rate = CatalogueCeilings(device).matmul_rate("bf16", 8192, 8192, 8192)
    assert rate == pytest.approx(SHARE * H100.peak("bf16") / (1 + 3 * WIDTH / 8192), rel=1e-3)


def test_a_gpu_that_the_catalogue_does_not_have_is_refused() -> None:
    with pytest.raises(NapkinError, match="GX-99"):
        measured_device(calibration("GX-99"))
