"""The straggler by events on the streams of GPUs is the one by the host's clock; torch's flight recorder is named."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from distributed.straggler_cases import SLOW
from napkin.accounting.rank_seconds import on_one_clock
from napkin.distributed.process_group import flight_dump, record_flights
from reliability.ranks import run_script_of_ranks


def test_all_ways_of_timing_name_the_rank_that_was_slowed(tmp_path: Path, server: subprocess.Popen[str]) -> None:
    run_script_of_ranks(Path(__file__).with_name("straggler_cases.py"), server, tmp_path, 3)
    named = json.loads((tmp_path / "named.json").read_text())
    assert named == {f"{case}, {way}": SLOW for case in ("calls", "ddp") for way in ("host", "clocks apart", "events")}


def test_clocks_are_brought_together_by_the_ends_of_shared_collectives_though_some_were_not_waited_for() -> None:
    def told(began: float, *calls: tuple[list[int], float, float, float]) -> dict:
        moved = [["all_reduce", 8, ranks, entered - began, waited, spent] for ranks, entered, waited, spent in calls]
        return {"peak_bytes": 1, "seconds": 9.0, "calls": moved}

    # Rank 2 shares collectives with rank 1 alone. Rank 1 comes late to the second one, which had ended.
    zero = told(100.0, ([0, 1], 1.0, 0.5, 0.5), ([0, 1], 2.0, 0.2, 0.2))
    one = told(-7.0, ([0, 1], 1.4, 0.1, 0.1), ([1, 2], 3.0, 0.5, 0.5), ([0, 1], 2.0, 0.0, 4.0))
    two = told(0.25, ([1, 2], 3.3, 0.2, 0.2))
    found = on_one_clock([zero, one, two])
    entered = [call[3] for each in found for call in each["calls"]]
    assert entered == pytest.approx([each - 100.0 for each in (1.0, 2.0, 1.4, 3.0, 2.0, 3.3)])


def test_the_flight_recorder_is_switched_on_and_its_dump_named(tmp_path: Path) -> None:
    environment = {"MASTER_PORT": "1234", "TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}
    record_flights(environment)
    # The user's own choice stays.
    assert environment["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "7"
    assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert "1234" in environment["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
    environment["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = str(tmp_path / "flight-")
    assert flight_dump(environment, 3, since=0.0) == ""
    (tmp_path / "flight-3").write_bytes(b"")
    os.utime(tmp_path / "flight-3", (1000, 1000))
    assert flight_dump(environment, 3, since=time.time() - 1) == ""
    line = flight_dump(environment, 3, since=999.0)
    assert f"'{tmp_path / 'flight-3'}'" in line
    assert f"fr_trace --prefix flight- {tmp_path}" in line
    assert "\n" not in line
