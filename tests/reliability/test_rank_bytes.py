"""What a plan says that a rank holds is what the rank holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rank_bytes.py"
CASES = ("fsdp 2 accumulated", "tensor 2", "pipeline 2 1f1b")
OTHERS = ("ddp 2 accumulated", "zero-1 2", "context 2", "tensor 2 experts", "hsdp 2 x 2", "expert 2")


@pytest.mark.torture
@pytest.mark.parametrize("cases", [CASES, OTHERS], ids=["some", "others"])
def test_planned_bytes_of_ranks_are_those_that_the_allocator_counts(cases: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, *cases],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith(cases)]) == len(cases), done.stdout
    worst = float(lines[-1].rpartition(" ")[2].removesuffix("%"))
    assert worst <= 0.1, done.stdout
