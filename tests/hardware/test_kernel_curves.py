"""Curves of kernels against published measurements, a formula written out by hand, and what no chip exceeds."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from napkin.accounting.ledger import Row
from napkin.accounting.pricing import roofline_seconds
from napkin.hardware.ceilings import CatalogueCeilings, efficiency_of
from napkin.hardware.cluster import interconnect_of, node_of
from napkin.hardware.device_file import catalogue, find_device
from napkin.hardware.kernel_curves import (
    DEPTH,
    PARTS,
    TILES,
    Chip,
    ProductCurve,
    chip_of,
    collective_seconds,
    curves_of,
    kernel_curves,
    one_product_seconds,
    product_curve,
    product_seconds,
    prompt_attention_seconds,
)

GENERATIONS = ("A100", "H100", "H200", "B200")
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
NINE_IN_TEN = 0.2
"""Relative error that nine in ten of the measurements are within: docs/hardware.md."""

# ai-dynamo/aiconfigurator's tables (Apache-2.0): gemm, context_attention and nccl of a100_sxm and h100_sxm.
PRODUCTS = [
    ("A100", (128, 4096, 4096), 37.4e-6),
    ("A100", (2048, 12288, 4096), 810.0e-6),
    ("H100", (128, 4096, 4096), 17.2e-6),
    ("H100", (2048, 5120, 4096), 103.3e-6),
    ("H100", (1, 10240, 12288), 89.0e-6),
    ("H100", (8192, 51200, 16384), 16248e-6),
    ("H100", (16, 128, 7168), 5.95e-6),
]
ATTENTION = [
    ("A100", (4, 4096, 64, 8, 128), 6306e-6),
    ("A100", (1, 2048, 32, 8, 128), 272.9e-6),
    ("H100", (4, 2048, 40, 8, 128), 405.1e-6),
    ("H100", (2, 12288, 16, 4, 128), 1982e-6),
]
COLLECTIVES = [
    ("A100", "all_gather", 8, 2 * 2**28, 2288e-6),
    ("A100", "all_reduce", 4, 2 * 2**14, 17.4e-6),
    ("H100", "all_reduce", 8, 2 * 2**28, 2111e-6),
    ("H100", "reduce_scatter", 2, 2 * 2**24, 95.7e-6),
    ("H100", "all_to_all", 8, 2 * 2**26, 404e-6),
    ("H100", "all_gather", 8, 2 * 2**8, 10.4e-6),
]


@pytest.mark.parametrize(("device", "shape", "seconds"), PRODUCTS)
def test_published_products_are_met(device: str, shape: tuple[int, int, int], seconds: float) -> None:
    assert product_seconds(find_device(device), *shape) == pytest.approx(seconds, rel=NINE_IN_TEN)


@pytest.mark.parametrize(("device", "shape", "seconds"), ATTENTION)
def test_published_attention_is_met(device: str, shape: tuple[int, int, int, int, int], seconds: float) -> None:
    assert prompt_attention_seconds(find_device(device), *shape) == pytest.approx(seconds, rel=NINE_IN_TEN)


@pytest.mark.parametrize(("device", "operation", "ranks", "data_bytes", "seconds"), COLLECTIVES)
def test_published_collectives_are_met(
    device: str, operation: str, ranks: int, data_bytes: int, seconds: float
) -> None:
    found = collective_seconds(find_device(device), operation, data_bytes, ranks)  # pyright: ignore[reportArgumentType]
    assert found == pytest.approx(seconds, rel=NINE_IN_TEN)


def by_hand(curve: ProductCurve, chip: Chip, batch: int, m: int, n: int, k: int) -> float:
    """Seconds of a product of which nothing is found in the cache, tile by tile and part by part."""
    norm = lambda *terms: sum(term**curve.sharpness for term in terms) ** (1 / curve.sharpness)  # noqa: E731
    moved = 2 * batch * (m * k + k * n + m * n)
    found: list[float] = []
    for (rows, columns), wanted in itertools.product(TILES, PARTS):
        blocks = -(-k // DEPTH)
        iterations = -(-blocks // wanted)
        parts = -(-blocks // iterations)
        tiles = batch * -(-m // rows) * -(-n // columns) * parts
        waves = tiles / chip.multiprocessors
        counted = waves + curve.idle_share * (math.ceil(waves) - waves)
        share = curve.peak_share / (1 + curve.tile_loss / rows + curve.tile_loss / columns)
        flops = 2 * rows * columns * DEPTH * iterations
        computing = counted * flops / (share * chip.peak / chip.multiprocessors)
        hot = 1 / (1 + (curve.sustained_seconds / computing) ** 2)
        computing *= 1 + (1 / curve.sustained_share - 1) * hot
        operands = waves * iterations * 2 * DEPTH * (rows + columns) / curve.operand_bandwidth
        turns = math.ceil(waves / min(8, max(1, curve.residency * 64 * 128 / rows / columns)))
        filling = turns * curve.fill_seconds * (rows * columns / 32768) ** curve.fill_exponent
        busy = norm(computing, operands, turns * iterations * curve.iteration_seconds) + filling
        active = min(tiles, chip.multiprocessors)
        each = min(curve.memory_bandwidth, curve.cached_bandwidth)
        reading = moved / min(curve.memory_share * chip.bandwidth, active * each) + curve.memory_seconds
        summing = 0.0
        if parts > 1:
            sums = 8 * batch * parts * m * n * curve.split_traffic
            summing = curve.split_seconds + sums / curve.cached_bandwidth / chip.multiprocessors
        found.append(curve.launch_seconds + norm(busy, reading) + summing)
    return min(found)


def test_the_curve_of_products_is_the_formula_tile_by_tile() -> None:
    random = np.random.default_rng(0)
    device = find_device("H100")
    curve = kernel_curves()["hopper"].product
    # Without a cache: all bytes come from memory.
    chip = dataclasses.replace(chip_of(device, "bf16"), cache_bytes=1e-6)
    for _ in range(30):
        batch, m, n, k = (int(2**power) for power in random.uniform(1, (4, 14, 14, 14)))
        shape = np.array([[batch], [m], [n], [k]], float)
        assert product_curve(shape, chip, curve)[0] == pytest.approx(by_hand(curve, chip, batch, m, n, k), rel=1e-6)


def test_a_product_priced_alone_is_the_one_of_many() -> None:
    """Large products are priced without kernels that divide k, which would not be chosen."""
    device = find_device("H200")
    curve, chip = kernel_curves()["hopper"].product, chip_of(device, "bf16")
    for m, n, k in itertools.product((64, 4096, 65536), (256, 8192, 128256), (128, 16384)):
        shape = np.array([[1], [m], [n], [k]], float)
        assert one_product_seconds(curve, chip, 1, m, n, k, math.inf) == pytest.approx(
            product_curve(shape, chip, curve, reuse=math.inf)[0]
        )


@pytest.mark.parametrize("name", GENERATIONS)
def test_products_are_not_faster_than_the_datasheet_allows(name: str) -> None:
    device = find_device(name)
    for m, n, k in itertools.product((1, 48, 1000, 8192), (32, 640, 16384), (32, 4096, 51200)):
        seconds = product_seconds(device, m, n, k, reuse=math.inf)
        assert seconds is not None
        assert seconds > 2 * m * n * k / device.peak("bf16")
        # Inputs may lie in the cache; weights, read for the first time, do not.
        assert seconds > 2 * k * n / device.memory_bandwidth


@pytest.mark.parametrize("name", GENERATIONS)
def test_more_work_takes_no_less_time(name: str) -> None:
    device = find_device(name)
    sizes = [1, 2, 17, 64, 65, 128, 500, 1024, 1025, 4096, 16384, 65536]
    for fixed in (128, 4096):
        by_rows = [product_seconds(device, size, fixed, 4096) for size in sizes[1:]]
        by_columns = [product_seconds(device, 512, size, fixed) for size in sizes]
        by_batch = [product_seconds(device, 128, fixed, 512, batch=size) for size in sizes[:8]]
        # Waves are counted whole, and a kernel may divide k evenly or not: a little of order is allowed.
        for seconds in (by_rows, by_columns, by_batch):
            assert is_rising(seconds, 0.99)
    lengths = [prompt_attention_seconds(device, 2, size, 16, 4, 128) for size in sizes]
    assert is_rising(lengths, 0.97)


def test_a_ledgers_products_take_the_seconds_of_their_curves_and_others_those_of_rooflines() -> None:
    device = find_device("H100")
    efficiency = dataclasses.replace(efficiency_of(device), product_share=0.8)
    by_curve = CatalogueCeilings(device, efficiency)
    without = CatalogueCeilings(device, dataclasses.replace(efficiency, product_share=None))
    flops, moved = 2 * 2048 * 4096 * 1024, 2 * (2048 * 1024 + 1024 * 4096)
    row = Row("", "forward", "mm", "bf16", flops, flops, 0, (1, 2048, 4096, 1024), moved, 2 * 2048 * 4096, 0, 0)
    alone = product_seconds(device, 2048, 4096, 1024, reuse=math.inf)
    assert alone is not None
    assert roofline_seconds(row, by_curve) == pytest.approx(alone / 0.8)
    assert roofline_seconds(row, without) != pytest.approx(alone / 0.8)
    others = [
        dataclasses.replace(row, format="fp8_e4m3fn"),
        dataclasses.replace(row, operator="add", contraction=None, flops=0),
        dataclasses.replace(row, operator="_scaled_dot_product_flash_attention"),
    ]
    for other in others:
        assert roofline_seconds(other, by_curve) == roofline_seconds(other, without)


def is_rising(seconds: Sequence[float | None], least: float) -> bool:
    """True if none is less than the one before it by more than a factor."""
    known = [each for each in seconds if each is not None]
    return len(known) == len(seconds) and all(after > least * before for before, after in itertools.pairwise(known))


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_collectives_grow_with_bytes_and_stay_above_the_link(name: str, operation: str) -> None:
    device = find_device(name)
    assert device.link_bandwidth is not None
    for ranks in (2, 4, 8):
        seconds = [
            collective_seconds(device, operation, 2.0**power, ranks)  # pyright: ignore[reportArgumentType]
            for power in range(8, 33)
        ]
        assert seconds == sorted(seconds, key=lambda each: each or 0.0)
        assert seconds[-1] is not None
        # What each rank must get from the others at least.
        assert seconds[-1] > 2.0**32 * (ranks - 1) / ranks / device.link_bandwidth * (operation != "all_reduce")
        assert seconds[-1] > 2.0**32 / ranks / device.link_bandwidth
    assert collective_seconds(device, operation, 2**20, 1) == 0.0  # pyright: ignore[reportArgumentType]


def test_devices_of_a_generation_with_curves_have_what_curves_need() -> None:
    capabilities = {each for curves in kernel_curves().values() for each in curves.compute_capabilities}
    of_these = [device for device in catalogue() if device.compute_capability in capabilities]
    assert len(of_these) > 20
    assert all(curves_of(device) is not None for device in of_these)
    assert curves_of(find_device("V100")) is None
    assert product_seconds(find_device("MI300X"), 128, 128, 128) is None
    assert product_seconds(find_device("H100"), 128, 128, 128, format_name="fp32") is None


def test_what_was_measured_on_a_device_is_preferred_to_its_generations_curves() -> None:
    device = find_device("H100")
    shape = ("bf16", 1, 4096, 4096, 4096)
    alone = product_seconds(device, *shape[2:], reuse=math.inf)
    assert alone is not None
    efficiency = dataclasses.replace(efficiency_of(device), product_share=0.8, collective_share=0.5)
    assert CatalogueCeilings(device, efficiency).product_seconds(*shape) == pytest.approx(alone / 0.8)
    own = dataclasses.replace(device, efficiency={"matmul_share": 0.7, "link_share": 0.8})
    assert CatalogueCeilings(own, efficiency).product_seconds(*shape) is None
    with_curves = interconnect_of(device, node_of(device), efficiency)
    without = interconnect_of(own, node_of(device), efficiency)
    assert with_curves is not None
    assert with_curves.curves is not None
    assert without is not None
    assert without.curves is None
    in_node = with_curves.group(8)
    assert with_curves.seconds("all_reduce", 2**24, in_node) == pytest.approx(
        2 * (collective_seconds(device, "all_reduce", 2**24, 8) or 0)
    )
