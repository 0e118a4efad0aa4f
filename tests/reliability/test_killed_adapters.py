"""Runs that train adapters: killed at any moment there is no run, or one that resumes to the bytes of a whole one."""

import json
import signal
import subprocess
import time
from hashlib import sha256
from pathlib import Path

import pytest

from oracles.tiny_tuning import make_start
from reliability.harness import Napkin, wait_until
from reliability.ranks import run_ranks, start_ranks

pytestmark = pytest.mark.torture
OPTIONS = (
    "--tuning.start start --data.train chats.jsonl --adapter.kind dora --adapter.rank 2 --training.steps 6 "
    "--training.batch-size 4 --training.checkpoint-every 2 --training.precision bf16 --training.device cpu "
    "--training.threads 1 --optimizer.learning-rate 1e-3 --optimizer.warmup-steps 0 --optimizer.average-decay 0.9"
).split()
WRITING_FROZEN = range(1, 12)
"""File operations near the frozen weights."""


def start_in(folder: Path, server: subprocess.Popen[str]) -> Napkin:
    make_start(folder)
    texts = [{"prompt": "ab"[n % 2], "completion": "cd" * (n % 3 + 1)} for n in range(9)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    return Napkin(folder, server)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, server: subprocess.Popen[str]) -> Napkin:
    napkin = start_in(tmp_path_factory.mktemp("adapters"), server)
    done = napkin.run("tune", "sft", *OPTIONS, "--run", "whole")
    assert done.status == 0, done.errors
    return napkin


def tensors(run: Path) -> dict[str, str]:
    """Checksums of the frozen weights and of the last checkpoint's."""
    files = [*(run / "checkpoints" / "frozen").iterdir(), *(run / "checkpoints/step-00000006").glob("*.safetensors")]
    return {str(path.relative_to(run)): sha256(path.read_bytes()).hexdigest() for path in files}


def assert_ends_whole(napkin: Napkin, run: str) -> None:
    """Make the run, or resume it, and hold it against the whole one."""
    there = (napkin.folder / run).exists()
    done = napkin.run("resume", run) if there else napkin.run("tune", "sft", *OPTIONS, "--run", run)
    assert done.status == 0, done.errors
    assert tensors(napkin.folder / run) == tensors(napkin.folder / "whole")
    assert not [path for path in napkin.folder.rglob("*.tmp") if run in str(path)]


@pytest.mark.parametrize("number", WRITING_FROZEN)
def test_a_kill_while_frozen_weights_are_written_leaves_no_run(place: Napkin, number: int) -> None:
    run = f"frozen-{number}"
    killed = place.run("tune", "sft", *OPTIONS, "--run", run, signal_at=number, near="checkpoints/.frozen.")
    assert killed.status == -signal.SIGKILL
    assert not (place.folder / run).exists()
    assert_ends_whole(place, run)


@pytest.mark.parametrize("number", [1, 2, 4, 8, 16, 24, 32])
def test_a_kill_while_the_run_is_made_leaves_no_run_or_one_that_resumes(place: Napkin, number: int) -> None:
    run = f"made-{number}"
    killed = place.run("tune", "sft", *OPTIONS, "--run", run, signal_at=number, near=f".{run}.")
    assert killed.status == -signal.SIGKILL
    assert_ends_whole(place, run)


@pytest.mark.parametrize("number", [1, 5, 9, 13, 17, 18])
def test_a_kill_while_a_checkpoint_is_written_or_removed_loses_nothing(place: Napkin, number: int) -> None:
    run = f"written-{number}"
    killed = place.run("tune", "sft", *OPTIONS, "--run", run, signal_at=number, near=".step-00000002.")
    assert killed.status == -signal.SIGKILL
    assert_ends_whole(place, run)


def test_a_disk_that_is_full_when_frozen_weights_are_written_leaves_no_run(place: Napkin) -> None:
    size = (place.folder / "whole" / "checkpoints" / "frozen" / "model.safetensors").stat().st_size
    full = place.run("tune", "sft", *OPTIONS, "--run", "full", largest_file=size - 1)
    assert full.status == 2
    assert len(full.errors) == 1
    assert "the frozen weights cannot be written" in full.errors[0]
    assert_ends_whole(place, "full")


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_two_killed_ranks_resume_to_the_same_bytes_and_need_no_start(
    tmp_path: Path, server: subprocess.Popen[str], parallelism: str
) -> None:
    napkin = start_in(tmp_path, server)
    command = ["tune", "sft", *OPTIONS, "--training.parallelism", parallelism]
    run_ranks(napkin, 2, *command, "--run", "whole")
    ranks = start_ranks(napkin, 2, *command, "--run", "killed")
    wait_until(lambda: (tmp_path / "killed/checkpoints/step-00000002").exists(), ranks[0])
    time.sleep(0.05)
    for rank in ranks:
        rank.send(signal.SIGKILL)
    assert [rank.wait() for rank in ranks] == [-9, -9]
    (tmp_path / "start").rename(tmp_path / "gone")
    run_ranks(napkin, 2, "resume", "killed")
    assert tensors(tmp_path / "killed") == tensors(tmp_path / "whole")
    # In one process, too.
    done = napkin.run("generate", "killed", "--tokens", "3", "--temperature", "0")
    assert done.status == 0, done.errors
