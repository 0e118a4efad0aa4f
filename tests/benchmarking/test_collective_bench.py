"""Collectives by size and ranks: bandwidths as NCCL's own tests define them, α and β found again, real processes."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from napkin.benchmarking.collective_bench import (
    COLLECTIVES,
    CollectiveRow,
    collective_shapes,
    collective_values,
    fit_alpha_beta,
    fitted,
    time_in_processes,
)
from napkin.errors import NapkinError
from napkin.hardware.cluster import Group, Interconnect, Operation
from napkin.hardware.rank_calibration import SIZES
from reliability.harness import Napkin
from reliability.ranks import run_ranks


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(
    ("operation", "factor"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1), ("all_to_all", 1)]
)
def test_bus_bandwidth_is_algorithm_bandwidth_times_the_factor_of_a_ring(
    operation: Operation, factor: int, ranks: int
) -> None:
    values = collective_values(CollectiveRow(operation, 8 * 10**6, ranks, (0.02,) * 7))
    assert values["algorithm_bandwidth"] == pytest.approx(4e8)
    assert values["bus_bandwidth"] == pytest.approx(4e8 * factor * (ranks - 1) / ranks)


def test_the_fit_finds_the_start_and_the_bandwidth_of_the_plans_model_again() -> None:
    # One hop of no length: a ring of the interconnect that plans price with, which takes no tree here.
    planned = Interconnect(3e9, 3e9, 4, start_seconds=40e-6, link_hop_seconds=0.0)
    rows = [
        CollectiveRow("all_gather", size, 4, (planned.seconds("all_gather", size, Group(4)),) * 6) for size in SIZES
    ]
    found, fits = fitted(rows)
    assert fits[4].start_seconds == pytest.approx(40e-6)
    assert fits[4].bandwidth == pytest.approx(3e9)
    assert [row.fitted_seconds for row in found] == pytest.approx([row.samples[0] for row in rows])


def test_noise_of_a_tenth_moves_the_fit_by_no_more_than_that() -> None:
    random, sizes = np.random.default_rng(0), np.geomspace(1e3, 1e8, 12)
    seconds = (1e-4 + sizes / 2e9) * random.lognormal(0, 0.1, 12)
    fit = fit_alpha_beta(list(zip(sizes.tolist(), seconds.tolist(), strict=True)))
    assert fit.start_seconds == pytest.approx(1e-4, rel=0.1)
    assert fit.bandwidth == pytest.approx(2e9, rel=0.1)


def test_neither_part_of_a_fit_is_negative() -> None:
    steeper = fit_alpha_beta([(1e3, 1e-6), (1e6, 1.2e-3)])
    assert (steeper.start_seconds, steeper.bandwidth) == (0.0, pytest.approx(9e8, rel=0.1))
    flat = fit_alpha_beta([(1e3, 2e-3), (1e6, 1e-3)])
    assert flat.bandwidth == float("inf")
    assert 1e-3 < flat.start_seconds < 2e-3
    assert fit_alpha_beta([(1e6, 1e-3)]).seconds(2e6) == pytest.approx(2e-3)
    with pytest.raises(NapkinError, match="no seconds to fit"):
        fit_alpha_beta([])


def test_shapes_name_sizes_and_ranks_and_torchrun_decides_on_ranks() -> None:
    assert collective_shapes([]) == {2: list(SIZES)}
    assert collective_shapes([{"bytes": 64}, {"bytes": 64, "ranks": 3}, {"bytes": 128}]) == {2: [64, 128], 3: [64]}
    assert collective_shapes([{"bytes": 64}], 8) == {8: [64]}
    with pytest.raises(NapkinError, match="torchrun has started 8"):
        collective_shapes([{"ranks": 2}], 8)
    with pytest.raises(NapkinError, match="a collective has 2 to"):
        collective_shapes([{"ranks": 1}])


@pytest.mark.thorough
def test_two_processes_measure_what_fits_and_the_rest_is_named() -> None:
    sizes = {2: [1000, 10**12]}
    ran, refused = time_in_processes("reduce_scatter", sizes, threads=1, seconds=1e-3, free_bytes=2e9)
    # A whole number of floats for each of the ranks.
    assert (ran.data_bytes, ran.ranks, ran.sent_bytes) == (1000, 2, 500)
    assert len(ran.samples) >= 3
    assert min(ran.samples) > 0
    assert refused.refused == "out of memory by plan: 4.00 TB of 2.00 GB"
    (found, _), fits = fitted([ran, refused])
    assert found.fitted_seconds == pytest.approx(ran.seconds.median if ran.seconds else 0)
    assert fits.keys() == {2}


@pytest.mark.thorough
def test_under_torchrun_all_ranks_measure_and_rank_zero_prints(tmp_path: Path, server: subprocess.Popen[str]) -> None:
    command = "bench all-reduce --shapes bytes=4KiB bytes=64KiB --seconds 0.01 --json".split()
    ranks = run_ranks(Napkin(tmp_path, server), 2, *command)
    assert ranks[1].out.read_text() == ""
    printed = json.loads(ranks[0].out.read_text())
    assert [(row["bytes"], row["ranks"]) for row in printed["rows"]] == [(4096, 2), (65536, 2)]
    assert printed["name"] in COLLECTIVES
    assert printed["fits"].keys() == {"2"}
