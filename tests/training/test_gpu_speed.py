# pyright: reportMissingImports=false
"""The benchmark of speeds on a GPU runs to its end, with tiny sizes on the CPU."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_every_contender_of_a_cpu_is_measured_and_the_report_has_its_ratio() -> None:
    from gpu_first_hour import Found
    from gpu_speed import PEERS, steps, table
    from gpu_speed_cases import CASES, measure

    found: dict[tuple[str, str], Found] = {}
    for step in steps(tiny=True):
        result = measure(step.layer, step.name, tiny=True, device="cpu")
        assert result.speed > 0
        found[step.layer, step.name] = Found("passed", 1.0, [msgspec.json.encode(result).decode()])
    assert {case for case, _ in found} == set(CASES)
    found["8B block, step", "torchtitan"] = Found("failed", 1.0, ["Traceback", "ImportError: no such name", ""])
    lines = table(found)
    assert len(lines) == 2 + len(found) + 2
    for line, ((case, who), each) in zip(lines[2:], found.items(), strict=False):
        assert line.startswith(f"| {case} | {who} | ")
        assert ("tokens/s" in line) == (each.outcome == "passed")
    assert "failed: ImportError: no such name" in lines[-3] + "".join(lines)
    assert lines[-1].startswith("Not installed: ")
    assert any(peer in lines[-1] for peer in (*PEERS, "none"))


@pytest.mark.thorough
def test_the_script_measures_each_contender_in_a_process_and_keeps_what_it_has() -> None:
    command = [sys.executable, "gpu_speed.py", "--dry-run", "--only", "prefill"]
    first = subprocess.run([*command, "--again"], cwd=BENCHMARKS, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    again = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    # Nothing was measured anew.
    assert "passed after" in first.stdout
    assert "passed after" not in again.stdout
    assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
