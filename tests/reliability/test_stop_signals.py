"""Signals that stop a run: the step at hand ends, a checkpoint is written, and the run goes on from there later."""

import dataclasses
import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from napkin.recipe.toml_file import format_recipe
from oracles.tiny_run import TRAINING, tiny_recipe
from reliability.harness import Command, Napkin, assert_same_run, checkpoints, figures, lines_of_metrics, wait_until


@pytest.mark.thorough
@pytest.mark.parametrize(
    "what",
    [
        *(signal.SIGINT, signal.SIGUSR1),
        # SIGTERM comes in a test below.
        *(
            pytest.param(each, marks=pytest.mark.torture)
            for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGXCPU)
        ),
    ],
)
def test_a_signal_ends_the_run_with_a_checkpoint_and_a_line_that_says_how_to_resume(
    napkin: Napkin, uninterrupted: Path, what: signal.Signals
) -> None:
    run = napkin.folder / "run"
    command = napkin.run("train", "recipe.toml", "--run", "run", after_step=5, signals=[what])
    assert_stopped(command, what, run)
    assert checkpoints(run)[-1] == 5
    assert napkin.run("resume", "run").status == 0
    assert_same_run(run, uninterrupted)


@pytest.mark.torture
def test_a_signal_from_another_process_ends_the_run_alike(napkin: Napkin, uninterrupted: Path) -> None:
    run = napkin.folder / "run"
    command = napkin.start("train", "recipe.toml", "--run", "run")
    wait_until(lambda: lines_of_metrics(run) >= 5, command)
    command.send(signal.SIGTERM)
    assert_stopped(command, signal.SIGTERM, run)
    assert 5 <= checkpoints(run)[-1] < TRAINING.steps
    assert napkin.run("resume", "run").status == 0
    assert_same_run(run, uninterrupted)


def test_a_signal_before_the_first_step_leaves_a_run_that_resumes(napkin: Napkin, uninterrupted: Path) -> None:
    run = napkin.folder / "run"
    # The file of metrics is made right before the first step.
    command = napkin.run(
        "train", "recipe.toml", "--run", "run", signal_at=1, near=".metrics.jsonl.", signal=signal.SIGTERM
    )
    assert_stopped(command, signal.SIGTERM, run)
    assert checkpoints(run) == [0]
    assert napkin.run("resume", "run").status == 0
    assert_same_run(run, uninterrupted)


@pytest.mark.torture
@pytest.mark.parametrize("writing", ["background", pytest.param("wait", marks=pytest.mark.torture)])
def test_a_signal_while_a_checkpoint_is_written_waits_for_it(napkin: Napkin, uninterrupted: Path, writing: str) -> None:
    run = napkin.folder / "run"
    command = napkin.run(
        *("train", "recipe.toml", "--run", "run", "--training.checkpoint-writing", writing),
        **{"signal_at": 5, "near": ".step-00000012.", "signal": signal.SIGINT},
    )
    assert_stopped(command, signal.SIGINT, run)
    # In the background, training goes on meanwhile.
    assert checkpoints(run) == [6, 12] if writing == "wait" else 12 in checkpoints(run)
    assert napkin.run("resume", "run").status == 0
    assert_same_run(run, uninterrupted)


def test_a_signal_in_the_last_checkpoint_comes_too_late_to_stop_anything(napkin: Napkin, uninterrupted: Path) -> None:
    command = napkin.run(
        "train", "recipe.toml", "--run", "run", signal_at=5, near=".step-00000040.", signal=signal.SIGTERM
    )
    assert command.status == 0
    assert_same_run(napkin.folder / "run", uninterrupted)


@pytest.mark.thorough
@pytest.mark.parametrize("average_decay", [None, pytest.param(0.9, marks=pytest.mark.torture)])
def test_an_evaluation_does_not_keep_a_signal_waiting_and_is_made_up_for(
    napkin: Napkin, average_decay: float | None
) -> None:
    write_recipe_with_evaluations(napkin, average_decay)
    assert napkin.run("train", "recipe.toml", "--run", "uninterrupted").status == 0
    run = napkin.folder / "run"
    command = stopped_in_the_evaluation(napkin, signal.SIGTERM)
    assert command.status == 128 + signal.SIGTERM
    # The step is done and saved; its line comes with its evaluation.
    assert checkpoints(run) == [2]
    assert lines_of_metrics(run) == 1
    assert napkin.run("resume", "run").status == 0
    assert_same_run(run, napkin.folder / "uninterrupted")


@pytest.mark.torture
def test_the_last_evaluation_that_was_given_up_is_all_that_resuming_does(napkin: Napkin) -> None:
    write_recipe_with_evaluations(napkin, steps=2)
    assert napkin.run("train", "recipe.toml", "--run", "uninterrupted").status == 0
    run = napkin.folder / "run"
    assert stopped_in_the_evaluation(napkin, signal.SIGTERM).status == 128 + signal.SIGTERM
    for _ in range(2):
        assert napkin.run("resume", "run").status == 0
        assert figures(run) == figures(napkin.folder / "uninterrupted")


@pytest.mark.parametrize(
    ("what", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.torture)],
)
def test_a_second_signal_ends_the_run_at_once(napkin: Napkin, what: signal.Signals, status: int) -> None:
    write_recipe_with_evaluations(napkin)
    # The second one comes when the first has led to a checkpoint.
    command = stopped_in_the_evaluation(napkin, what, signal_at=1, near=".step-00000002.", signal=what)
    assert command.status == status
    assert lines_of_metrics(napkin.folder / "run") == 1
    assert checkpoints(napkin.folder / "run") == []
    assert len(command.errors) <= 1


@pytest.mark.parametrize("what", [signal.SIGHUP, signal.SIGUSR1])
def test_a_warning_that_comes_again_and_a_stop_after_it_change_nothing(napkin: Napkin, what: signal.Signals) -> None:
    write_recipe_with_evaluations(napkin)
    # A shell and the kernel each send SIGHUP; a cluster sends SIGTERM when its warning is over.
    command = stopped_in_the_evaluation(napkin, what, what, signal_at=1, near=".step-00000002.", signal=signal.SIGTERM)
    assert command.status == 128 + what
    assert checkpoints(napkin.folder / "run") == [2]
    assert len(command.errors) == 1
    assert command.errors[0].startswith(f"{what.name}: checkpoint saved")


def test_nohup_stays_in_effect(napkin: Napkin, uninterrupted: Path) -> None:
    ignored = {"ignored": [signal.SIGHUP], "signals": [signal.SIGHUP], "after_step": 5}
    assert napkin.run("train", "recipe.toml", "--run", "run", **ignored).status == 0
    assert_same_run(napkin.folder / "run", uninterrupted)


@pytest.mark.torture
def test_a_lost_terminal_ends_the_run_with_a_checkpoint(napkin: Napkin, uninterrupted: Path) -> None:
    run = napkin.folder / "run"
    ours, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "napkin", "train", "recipe.toml", "--run", "run"],
        cwd=napkin.folder,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        # The first process of a session, which the kernel tells when its terminal is gone.
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    reader = threading.Thread(target=read_until_closed, args=(ours, lambda: lines_of_metrics(run) >= 5))
    reader.start()
    reader.join()
    os.close(ours)
    assert process.wait() == 128 + signal.SIGHUP
    assert 5 <= checkpoints(run)[-1] < TRAINING.steps
    assert checkpoints(run)[-1] == figures(run)[-1]["step"]
    assert (run / "report.html").exists()
    assert napkin.run("resume", "run").status == 0
    assert_same_run(run, uninterrupted)


@pytest.mark.torture
def test_a_run_whose_output_nobody_reads_any_longer_stops_with_a_checkpoint(
    napkin: Napkin, uninterrupted: Path
) -> None:
    run = napkin.folder / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "napkin", "train", "recipe.toml", "--run", "run"],
        cwd=napkin.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        while lines_of_metrics(run) < 5 and process.poll() is None:
            time.sleep(0.001)
        process.stdout.close()
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert checkpoints(run)[-1] == figures(run)[-1]["step"] < TRAINING.steps
    assert (run / "report.html").exists()
    assert napkin.run("resume", "run").status == 0
    assert_same_run(run, uninterrupted)


def read_until_closed(terminal: int, done: Callable[[], bool]) -> None:
    """Read what is shown on a terminal, which would be full otherwise, until something is the case."""
    while not done():
        if select.select([terminal], [], [], 0.001)[0]:
            os.read(terminal, 4096)


def assert_stopped(command: Command, what: signal.Signals, run: Path) -> None:
    """The exit status, a checkpoint after the last step that was logged, one line."""
    assert command.wait() == 128 + what
    assert checkpoints(run)[-1] == (figures(run)[-1]["step"] if figures(run) else 0)
    assert len(command.errors) == 1
    assert f"napkin resume {run.name}" in command.errors[0]


def write_recipe_with_evaluations(napkin: Napkin, average_decay: float | None = None, steps: int = 4) -> None:
    """Evaluations of many windows, one at a time, of which each can be the last."""
    recipe = tiny_recipe(".", steps=steps, micro_batch_size=1, evaluate_every=2, evaluation_tokens=1_000)
    recipe = dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, validation=recipe.data.train),
        optimizer=dataclasses.replace(recipe.optimizer, average_decay=average_decay),
    )
    (napkin.folder / "recipe.toml").write_text(format_recipe(recipe))


def stopped_in_the_evaluation(napkin: Napkin, *signals: signal.Signals, **settings: Any) -> Command:
    """A run that got signals before the first window of the evaluation after step 2."""
    return napkin.run("train", "recipe.toml", "--run", "run", after_step=2, signals=signals, **settings)
