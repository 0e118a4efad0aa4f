"""kill -9 at any moment, then `napkin resume`: the run ends as one that nothing happened to, bit for bit."""

import dataclasses
import os
import random
import signal
import time
from pathlib import Path

import pytest

from napkin.recipe.toml_file import format_recipe
from oracles.tiny_run import TRAINING, tiny_recipe
from reliability.conftest import Tally
from reliability.harness import (
    Command,
    Napkin,
    assert_same_run,
    checkpoints,
    figures,
    has_ended,
    lines_of_metrics,
    start_process,
    wait_until,
)

KILLS = int(os.environ.get("NAPKIN_KILLS", "200")) // 2
"""By each number of threads."""
EVERY = TRAINING.checkpoint_every
# Of the run's first checkpoint: its writing touches files 16 times, its removal, two checkpoints later, 3 times.
FIRST_CHECKPOINT = f".step-{EVERY:08d}."
WRITING, REMOVING = range(1, 17), range(17, 20)


@pytest.mark.torture
def test_a_process_that_was_killed_resumes_as_if_it_had_never_stopped(napkin: Napkin, uninterrupted: Path) -> None:
    run = napkin.folder / "run"
    command = start_process(napkin.folder, "train", "recipe.toml", "--run", "run")
    wait_until(lambda: lines_of_metrics(run) >= 10, command)
    command.send(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    resumed = start_process(napkin.folder, "resume", "run")
    assert resumed.wait() == 0, resumed.errors
    assert_same_run(run, uninterrupted)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [9, 17])
def test_a_kill_at_this_moment_of_a_checkpoint_loses_nothing(
    napkin: Napkin, uninterrupted: Path, number: int, tally: Tally
) -> None:
    kill_at(napkin, uninterrupted, number, FIRST_CHECKPOINT)
    tally("kill -9 at a file operation of a checkpoint", 1, number in WRITING)


@pytest.mark.torture
@pytest.mark.parametrize("number", [*WRITING, *REMOVING])
def test_a_kill_at_every_moment_of_a_checkpoint_loses_nothing(
    napkin: Napkin, uninterrupted: Path, number: int, tally: Tally
) -> None:
    kill_at(napkin, uninterrupted, number, FIRST_CHECKPOINT)
    tally("kill -9 at a file operation of a checkpoint", 1, number in WRITING)


@pytest.mark.torture
@pytest.mark.parametrize("near", [".metrics.jsonl.", ".plan.json.", ".measurement.json.", ".lock"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_kill_while_a_small_file_is_written_loses_nothing(
    napkin: Napkin, uninterrupted: Path, near: str, number: int
) -> None:
    if (near, number) in ((".lock", 2), (".lock", 3)):
        pytest.skip("the lock is opened once")
    kill_at(napkin, uninterrupted, number, near)
    assert not list((napkin.folder / "run").rglob("*.tmp"))


@pytest.mark.parametrize("number", [11])
def test_a_kill_while_the_run_folder_is_made_leaves_no_run_or_one_that_resumes(
    napkin: Napkin, uninterrupted: Path, number: int
) -> None:
    assert napkin.run("train", "recipe.toml", "--run", "run", signal_at=number, near=".run.").status == -signal.SIGKILL
    assert not (napkin.folder / "run").exists()
    again = napkin.run("train", "recipe.toml", "--run", "run")
    assert again.status == 0, again.errors
    assert_same_run(napkin.folder / "run", uninterrupted)


@pytest.mark.thorough
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_never_was(
    napkin: Napkin, uninterrupted: Path, tally: Tally
) -> None:
    # The first kill comes before there is a checkpoint, the second while one is written.
    kills, inside = killed_to_its_end(napkin, uninterrupted, seed=1, first_kill=3, most_kills=4)
    assert kills >= 2
    tally("kill -9 at a random instant", kills, inside)


@pytest.mark.torture
@pytest.mark.parametrize("threads", [1, 2])
def test_hundreds_of_kills_half_of_them_inside_a_checkpoint(napkin: Napkin, threads: int, tally: Tally) -> None:
    recipe = tiny_recipe(".", threads=threads, steps=100, keep_best=True)
    recipe = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, average_decay=0.99))
    (napkin.folder / "recipe.toml").write_text(format_recipe(recipe))
    napkin.run("train", "recipe.toml", "--run", "reference")
    kills = inside = seed = 0
    while kills < KILLS or inside < KILLS // 2:
        more = killed_to_its_end(napkin, napkin.folder / "reference", seed=seed, run=f"run-{seed}", most_kills=20)
        kills, inside, seed = kills + more[0], inside + more[1], seed + 1
    tally(f"kill -9 at a random instant, {threads} threads", kills, inside)


def kill_at(napkin: Napkin, uninterrupted: Path, number: int, near: str) -> None:
    """Kill a run at a file operation, resume it, and hold it against the one that was not."""
    killed = napkin.run("train", "recipe.toml", "--run", "run", signal_at=number, near=near)
    assert killed.status == -signal.SIGKILL
    resumed = napkin.run("resume", "run")
    assert resumed.status == 0, resumed.errors
    assert resumed.errors == []
    assert_same_run(napkin.folder / "run", uninterrupted)
    assert len(checkpoints(napkin.folder / "run")) == TRAINING.keep_checkpoints
    assert not list((napkin.folder / "run" / "checkpoints").glob(".*"))


def killed_to_its_end(
    napkin: Napkin, reference: Path, *, seed: int, most_kills: int, first_kill: int = 0, run: str = "run"
) -> tuple[int, int]:
    """Start a run, kill and resume it until it ends by itself; returns the kills, and those inside a checkpoint.

    Every second kill waits for a checkpoint's writing to begin, and comes a random instant later.
    """
    draw = random.Random(seed)
    folder = napkin.folder / run
    steps = len(figures(reference))
    kills = inside = 0
    command = napkin.start("train", "recipe.toml", "--run", run)
    while True:
        if kills >= most_kills:
            command.wait()
        elif kills % 2:
            kill_inside_a_checkpoint(command, folder, draw)
        else:
            target = first_kill or lines_of_metrics(folder) + draw.randrange(steps // 3)
            first_kill = 0
            wait_until(lambda target=target: lines_of_metrics(folder) >= target, command)
            time.sleep(draw.random() * 0.01)
            command.send(signal.SIGKILL)
        if command.wait() == 0:
            break
        assert command.status == -signal.SIGKILL, command.errors
        kills += 1
        inside += bool(list((folder / "checkpoints").glob(".step-*.tmp"))) if folder.exists() else 0
        assert_at_most_the_steps_since_the_last_checkpoint_are_lost(folder)
        command = napkin.start("resume", run) if folder.exists() else napkin.start("train", "recipe.toml", "--run", run)
    assert command.errors == []
    assert_same_run(folder, reference)
    return kills, inside


def kill_inside_a_checkpoint(command: Command, run: Path, draw: random.Random) -> None:
    wait_until(lambda: bool(list((run / "checkpoints").glob(".step-*.tmp"))), command)
    time.sleep(draw.random() * 0.008)
    if not has_ended(command):
        command.send(signal.SIGKILL)


def assert_at_most_the_steps_since_the_last_checkpoint_are_lost(run: Path) -> None:
    done = lines_of_metrics(run)
    # One checkpoint may be under way, and training may be on its way to the next one.
    due = (done - 1) // EVERY * EVERY - EVERY
    if due > 0:
        assert checkpoints(run)[-1] >= due
