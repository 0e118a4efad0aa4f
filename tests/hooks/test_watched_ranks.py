"""Loops on two ranks: planned as rank 0's own step, metered on each rank, written by rank 0, ended with a rank."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from napkin.json_files import read_json
from napkin.report.comparison import read_run
from napkin.runs.accounting_files import MeasurementFile
from reliability.ranks import run_script_of_ranks


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, server: subprocess.Popen[str]) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_script_of_ranks(Path(__file__).with_name("watched_rank_cases.py"), server, folder, 2)
    return folder


def told(job: Path, case: str) -> list[dict[str, Any]]:
    return [json.loads((job / f"{case}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("case", ["ddp", "fsdp"])
def test_the_step_of_rank_0_is_planned_and_every_rank_is_metered(job: Path, case: str) -> None:
    zero, one = told(job, case)
    assert zero["losses"] == zero["alone"]
    assert one["losses"] == one["alone"]
    assert zero["planned flops"] == zero["flops"] > 0
    assert zero["planned peak"] == pytest.approx(zero["peak"], rel=1e-3)
    assert zero["collectives"] > 0
    assert [[each[0], each[1]] for each in zero["ranks"]] == [[0, zero["peak"]], [1, one["peak"]]]
    assert zero["run"] == case
    assert one["run"] is None
    assert one["planned flops"] is None
    run = read_run(job / case, training=False).summary
    assert (run.state, run.step) == ("finished", 6)
    measured = read_json(job / case / "measurement.json", MeasurementFile)
    assert measured is not None
    assert [each.peak_bytes for each in measured.ranks] == [zero["peak"], one["peak"]]
    fullest = next(row for row in measured.table if row.quantity == "peak bytes, fullest rank")
    assert fullest.meter == max(zero["peak"], one["peak"])
    if case == "ddp":  # rank 1 has twice the rows
        assert one["flops"] == 2 * zero["flops"]


def test_the_rank_that_the_others_wait_for_is_named(job: Path) -> None:
    zero, _ = told(job, "slow")
    assert zero["straggler"] == 1
    (said,) = [each for each in zero["verdict"] if "collectives" in each]
    assert said.startswith("waits for collectives ")
    assert said.endswith("rank 1 is the straggler")


def test_a_rank_that_dies_leaves_no_one_waiting_and_is_named(job: Path) -> None:
    assert json.loads((job / "killed-0.json").read_text())
    assert not (job / "killed-1.json").exists()
    said = (job / "killed" / "verdict.txt").read_text()
    assert "rank 1 did not report at the end of the loop: its bytes are missing" in said
    assert (job / "killed" / "report.html").is_file()
