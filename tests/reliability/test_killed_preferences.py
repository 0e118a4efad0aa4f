"""Tuning on preferences by two ranks: killed at any instant and resumed, it ends with the bytes of a whole run."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from oracles.tiny_tuning import make_start
from reliability.harness import Napkin
from reliability.ranks import run_ranks, start_ranks

pytestmark = pytest.mark.torture
OPTIONS = (
    "--tuning.start start --data.train pairs.jsonl --data.validation pairs.jsonl --training.steps 12 "
    "--training.batch-size 4 --training.checkpoint-every 2 --training.evaluate-every 4 --training.precision fp32 "
    "--training.device cpu --training.threads 1 --optimizer.learning-rate 1e-3 --optimizer.warmup-steps 0"
).split()


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_two_killed_ranks_resume_to_the_same_bytes(
    tmp_path: Path, server: subprocess.Popen[str], objective: str
) -> None:
    make_start(tmp_path)
    pairs = [{"prompt": "ab"[n % 2], "chosen": "ab" * (n % 3 + 1), "rejected": "cd" * (n % 2 + 1)} for n in range(9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    napkin = Napkin(tmp_path, server)
    command = ["tune", "preference", *OPTIONS, "--preference.objective", objective]
    run_ranks(napkin, 2, *command, "--run", "whole")
    ranks = start_ranks(napkin, 2, *command, "--run", "killed")
    # As soon as something is there, in another place each time.
    awaited = {"dpo": "killed/reference-train.safetensors", "kto": "killed/checkpoints/step-00000004"}[objective]
    deadline = time.monotonic() + 120
    while not (tmp_path / awaited).exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    for rank in ranks:
        rank.send(signal.SIGKILL)
    assert [rank.wait() for rank in ranks] == [-9, -9]
    run_ranks(napkin, 2, "resume", "killed")
    for name in ("model.safetensors", "optimizer.safetensors"):
        whole, killed = (tmp_path / run / "checkpoints" / "step-00000012" / name for run in ("whole", "killed"))
        assert whole.read_bytes() == killed.read_bytes()
    for name in ("reference-train.safetensors", "reference-held-out.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
