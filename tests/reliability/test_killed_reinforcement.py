"""Reinforcement learning by two ranks: the answers and weights of one process; killed and resumed, the same bytes."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from napkin.runs.metrics import read_metrics
from napkin.training.run import train
from oracles.tiny_run import tiny_recipe, write_tiny_text
from reliability.harness import Napkin
from reliability.ranks import run_ranks, start_ranks

pytestmark = pytest.mark.torture
OPTIONS = (
    "--tuning.start start --rl.environment FILE --rl.reward regex --rl.group-size 4 --rl.max-answer 4 "
    "--rl.evaluation-prompts 6 --rl.updates-per-rollout 2 --training.steps 8 --training.batch-size 4 "
    "--training.checkpoint-every 2 --training.evaluate-every 4 --training.precision fp32 --training.device cpu "
    "--training.threads 1 --optimizer.learning-rate 1e-3 --optimizer.warmup-steps 0"
).replace("FILE", "prompts.jsonl")


def test_two_ranks_learn_what_one_does_and_resume_to_the_same_bytes(
    tmp_path: Path, server: subprocess.Popen[str]
) -> None:
    write_tiny_text(tmp_path)
    train(tiny_recipe(tmp_path, steps=2), tmp_path / "start")
    # About half of all answers have such a letter.
    prompts = [{"prompt": str(n), "answer": "(?s).*[a-p].*"} for n in range(60)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    napkin = Napkin(tmp_path, server)
    command = ["tune", "rl", *OPTIONS.split()]
    run_ranks(napkin, 2, *command, "--run", "whole")
    run_ranks(napkin, 1, *command, "--run", "alone")
    whole, alone = (list(read_metrics(tmp_path / run / "metrics.jsonl")) for run in ("whole", "alone"))
    first, second = (lines[0].figures or {} for lines in (whole, alone))
    for name in ("reward", "length", "equal_groups", "cut_share", "held-out reward"):
        assert first[name] == second[name]
    assert 0 < (first["reward"] or 0) < 1
    assert whole[0].loss == pytest.approx(alone[0].loss, abs=1e-6)
    stored = [load_file(tmp_path / run / "checkpoints/step-00000008/model.safetensors") for run in ("whole", "alone")]
    assert all(torch.allclose(stored[0][name], stored[1][name], atol=1e-4) for name in stored[0])

    ranks = start_ranks(napkin, 2, *command, "--run", "killed")
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed/checkpoints/step-00000004").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    for rank in ranks:
        rank.send(signal.SIGKILL)
    assert [rank.wait() for rank in ranks] == [-9, -9]
    run_ranks(napkin, 2, "resume", "killed")
    for name in ("model.safetensors", "optimizer.safetensors"):
        of_whole, of_killed = (tmp_path / run / "checkpoints/step-00000008" / name for run in ("whole", "killed"))
        assert of_whole.read_bytes() == of_killed.read_bytes()
