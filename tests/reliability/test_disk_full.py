"""A disk that is full: a clear line, status 2, and all that was there before still there."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from napkin.checkpoint.folder import read_checkpoint
from reliability.harness import Command, Napkin, assert_same_run, checkpoints, lines_of_metrics, weights


def stopped_after(napkin: Napkin, step: int) -> Path:
    """A run that was told to stop at a checkpoint, and whose loop writes them itself: it is at that step then."""
    wait = ("--training.checkpoint-writing", "wait")
    near = f".step-{step:08d}."
    command = napkin.run("train", "recipe.toml", "--run", "run", *wait, signal_at=3, near=near, signal=signal.SIGTERM)
    assert command.status == 128 + signal.SIGTERM
    return napkin.folder / "run"


def assert_refused(command: Command, *words: str) -> None:
    """Status 2, and one line that holds the words."""
    assert command.status == 2
    assert len(command.errors) == 1, command.errors
    for word in words:
        assert word in command.errors[0]


@pytest.mark.thorough
def test_a_disk_that_is_full_when_a_checkpoint_is_written_costs_that_checkpoint_alone(
    napkin: Napkin, uninterrupted: Path
) -> None:
    run = stopped_after(napkin, 12)
    size = (run / "checkpoints" / "step-00000012" / "optimizer.safetensors").stat().st_size
    before = weights(run)
    assert_refused(
        napkin.run("resume", "run", largest_file=size - 1), "step-00000018", "napkin resume run", "File too large"
    )
    assert checkpoints(run) == [6, 12]
    assert weights(run) == before
    assert not list((run / "checkpoints").glob(".*"))
    for path in (run / "checkpoints").iterdir():
        read_checkpoint(path)
    assert napkin.run("resume", "run").status == 0
    assert_same_run(run, uninterrupted)


def test_a_disk_that_is_full_behind_the_loops_back_ends_the_run_with_a_clear_line(
    napkin: Napkin, uninterrupted: Path
) -> None:
    size = (uninterrupted / "checkpoints" / "step-00000040" / "optimizer.safetensors").stat().st_size
    command = napkin.run("train", "recipe.toml", "--run", "run", largest_file=size - 1)
    assert_refused(command, "step-00000006", "napkin resume run", "File too large")
    run = napkin.folder / "run"
    assert list((run / "checkpoints").iterdir()) == []
    assert 6 <= lines_of_metrics(run) <= 12
    assert napkin.run("resume", "run").status == 0
    assert_same_run(run, uninterrupted)


@pytest.mark.thorough
def test_a_disk_that_is_full_when_metrics_are_written_ends_the_run_with_a_clear_line(
    napkin: Napkin, uninterrupted: Path
) -> None:
    run = stopped_after(napkin, 12)
    size = (run / "metrics.jsonl").stat().st_size
    assert_refused(napkin.run("resume", "run", largest_file=size + 300), "metrics.jsonl", "napkin resume run")
    assert size < (run / "metrics.jsonl").stat().st_size <= size + 300
    assert checkpoints(run) == [6, 12]
    assert napkin.run("resume", "run").status == 0
    assert_same_run(run, uninterrupted)


def test_a_disk_that_is_full_from_the_beginning_leaves_a_run_that_resumes(napkin: Napkin, uninterrupted: Path) -> None:
    assert_refused(napkin.run("train", "recipe.toml", "--run", "run", largest_file=2000), "plan.json")
    assert napkin.run("resume", "run").status == 0
    assert_same_run(napkin.folder / "run", uninterrupted)
    assert json.loads((napkin.folder / "run" / "plan.json").read_text())["steps"] == 40


def test_a_disk_that_is_full_when_the_report_is_written_costs_the_report_alone(
    napkin: Napkin, uninterrupted: Path
) -> None:
    run = napkin.folder / "run"
    shutil.copytree(uninterrupted, run)
    before = (run / "report.html").read_bytes()
    assert_refused(napkin.run("resume", "run", largest_file=len(before) // 2), "report.html")
    assert (run / "report.html").read_bytes() == before
    assert_same_run(run, uninterrupted)


@pytest.mark.torture
def test_a_file_system_without_room_is_no_other_than_a_limit(napkin: Napkin, uninterrupted: Path) -> None:
    mount = ["unshare", "--mount", "sh", "-c"]
    small = napkin.folder / "small"
    small.mkdir()
    if subprocess.run([*mount, f"mount -t tmpfs -o size=1m tmpfs {small}"], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    # Room for the first checkpoint of some 500 kB, not for a second one beside it.
    script = f"""
        mount -t tmpfs -o size=800k tmpfs {small} && cd {napkin.folder}
        {sys.executable} -m napkin train recipe.toml --run small/run 2> errors.txt; echo $? > status.txt
        cp -r small/run kept
    """
    subprocess.run([*mount, script], check=True, capture_output=True)
    assert (napkin.folder / "status.txt").read_text() == "2\n"
    warning, refusal = (napkin.folder / "errors.txt").read_text().splitlines()
    assert "make room for" in warning
    assert "before they are written" in warning
    assert "train: the next checkpoint takes" in refusal
    kept = napkin.folder / "kept"
    assert checkpoints(kept) == [6]
    assert lines_of_metrics(kept) == 12
    assert napkin.run("resume", "kept").status == 0
    assert_same_run(kept, uninterrupted)
