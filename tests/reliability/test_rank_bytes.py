"""What a plan says that a rank holds is what the rank holds."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rank_bytes.py"
CASES = ("ddp 2 accumulated", "fsdp 2 accumulated", "tensor 2", "pipeline 2 1f1b", "zero-1 2")


def test_planned_bytes_of_ranks_are_those_of_their_tensors() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, *CASES],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert len(lines) == len(CASES), done.stdout
    worst = float(last.rpartition(" ")[2].removesuffix("%"))
    assert worst <= 0.1, done.stdout
