"""kill -9 from the last checkpoint to the end of the process, then `napkin resume`: the same files, none left over."""

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from napkin.recipe.toml_file import format_recipe
from oracles.tiny_run import TRAINING, tiny_recipe
from reliability.conftest import Tally, in_folder_of_tiny_run
from reliability.harness import Napkin, assert_same_run, files_of, weights

LAST = f".step-{TRAINING.steps:08d}."
MOST_OPERATIONS = 200


@pytest.fixture(scope="module")
def almost_done(tmp_path_factory: pytest.TempPathFactory, server: subprocess.Popen[str]) -> Path:
    """A run that was killed right before its last checkpoint, without a measurement."""
    napkin = in_folder_of_tiny_run(tmp_path_factory.mktemp("almost-done"), server)
    killed = napkin.run("train", "recipe.toml", "--run", "almost-done", signal_at=1, near=LAST)
    assert killed.status == -signal.SIGKILL
    (napkin.folder / "almost-done" / "measurement.json").unlink(missing_ok=True)
    return napkin.folder / "almost-done"


def metered(run: Path) -> dict[str, Any]:
    """The figures of measurement.json that are the same for every process."""
    table = json.loads((run / "measurement.json").read_text())["table"]
    exact = ("parameters", "FLOPs per step")
    return {row["quantity"]: row["meter"] for row in table if row["quantity"] in exact}


def kill_resume_and_compare(napkin: Napkin, begun: Path, uninterrupted: Path, number: int, near: str) -> bool:
    """Whether there was an operation of that number to kill the process at."""
    run = napkin.folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(begun, run)
    killed = napkin.run("resume", "run", signal_at=number, near=near, after=".measurement.json.")
    resumed = napkin.run("resume", "run")
    assert resumed.status == 0, (number, resumed.errors)
    assert resumed.errors == [], number
    assert_same_run(run, uninterrupted)
    assert files_of(run) == files_of(uninterrupted), number
    assert metered(run) == metered(uninterrupted), number
    again = napkin.run("resume", "run")
    assert "nothing was done" in again.out.read_text(), number
    return killed.status == -signal.SIGKILL


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("near", "number"),
    [(LAST, 9), (".measurement.json.", 2), (".measurement.json.", 4), (".report.html.", 1), (".report.html.", 2)],
)
def test_a_kill_at_this_moment_of_the_end_leaves_nothing_open(
    napkin: Napkin, almost_done: Path, uninterrupted: Path, near: str, number: int, tally: Tally
) -> None:
    assert kill_resume_and_compare(napkin, almost_done, uninterrupted, number, near)
    tally("kill -9 at a file operation of the end", 1)


@pytest.mark.torture
def test_a_kill_at_every_moment_of_the_end_leaves_nothing_open(
    napkin: Napkin, almost_done: Path, uninterrupted: Path, tally: Tally
) -> None:
    for number in range(1, MOST_OPERATIONS):
        if not kill_resume_and_compare(napkin, almost_done, uninterrupted, number, "run/"):
            break
    else:
        pytest.fail(f"more than {MOST_OPERATIONS} operations")
    assert number > 20
    tally("kill -9 at a file operation of the end", number - 1)


def test_resuming_a_complete_run_without_its_books_writes_them_and_says_so(napkin: Napkin, uninterrupted: Path) -> None:
    run = napkin.folder / "run"
    shutil.copytree(uninterrupted, run)
    for name in ("measurement.json", "report.html"):
        (run / name).unlink()
    before = weights(run)
    resumed = napkin.run("resume", "run")
    assert (resumed.status, resumed.errors) == (0, [])
    assert "its books, which were not closed, are now: measurement.json and report.html" in resumed.out.read_text()
    assert files_of(run) == files_of(uninterrupted)
    assert weights(run) == before
    assert metered(run) == metered(uninterrupted)
    measured = json.loads((run / "measurement.json").read_text())
    assert measured["steps"] == TRAINING.steps - 1
    assert measured["mfu"] > 0
    assert "nothing was done" in napkin.run("resume", "run").out.read_text()


def test_a_run_whose_processes_made_a_step_each_has_its_measurement(napkin: Napkin) -> None:
    (napkin.folder / "recipe.toml").write_text(format_recipe(tiny_recipe(".", steps=2, checkpoint_every=1)))
    assert napkin.run("train", "recipe.toml", "--run", "uninterrupted").status == 0
    killed = napkin.run("train", "recipe.toml", "--run", "run", signal_at=1, near=".step-00000002.")
    assert killed.status == -signal.SIGKILL
    (napkin.folder / "run" / "measurement.json").unlink(missing_ok=True)
    assert napkin.run("resume", "run").status == 0
    assert files_of(napkin.folder / "run") == files_of(napkin.folder / "uninterrupted")
    assert metered(napkin.folder / "run") == metered(napkin.folder / "uninterrupted")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("command", [("train", "recipe.toml", "--run", "run"), ("resume", "run")])
def test_drafts_of_killed_processes_beside_and_in_a_run_are_removed(
    napkin: Napkin, uninterrupted: Path, command: tuple[str, ...]
) -> None:
    killed = napkin.run("train", "recipe.toml", "--run", "run", signal_at=11, near=".run.")
    assert killed.status == -signal.SIGKILL
    assert len(list(napkin.folder.glob(".run.*.tmp"))) == 1
    of_others = [napkin.folder / ".run.mine.tmp", napkin.folder / ".other.0123456789abcdef.tmp"]
    if command[0] == "resume":
        shutil.copytree(uninterrupted, napkin.folder / "run")
        of_others += [
            napkin.folder / "run" / ".report.html.mine.tmp",
            napkin.folder / "run" / "checkpoints" / ".step-1.tmp",
        ]
        for name in (".report.html.", ".samples.txt.", ".evaluation.json."):
            (napkin.folder / "run" / f"{name}0123456789abcdef.tmp").touch()
        (napkin.folder / "run" / "checkpoints" / ".step-00000012.0123456789abcdef.tmp").mkdir()
    for path in of_others:
        path.touch()
    done = napkin.run(*command)
    assert done.status == 0, done.errors
    assert set(napkin.folder.rglob(".*.tmp")) == set(of_others)


COMMANDS = {
    "tokenizer train": ("tokenizer", "train", "text.txt", "--vocab-size", "300", "--out", "made/tokenizer.json"),
    "tokenizer encode": ("tokenizer", "encode", "text.txt", "--tokenizer", "tokenizer.json", "--out", "made"),
    "export": ("export", "made/run", "--out", "made/model", "--weights-only"),
    "evaluate": ("evaluate", "made/run"),
    "report": ("report", "made/run"),
    "runs --page": ("runs", "made/run", "--page", "made/page.html"),
}


def kill_and_repeat(napkin: Napkin, uninterrupted: Path, what: str, number: int) -> bool:
    """Kill a command at its `number`-th operation on what it writes, call it again; whether there was one."""
    made, command = napkin.folder / "made", COMMANDS[what]
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(uninterrupted, made / "run")
    (made / "run" / "report.html").unlink()
    killed = napkin.run(*command, signal_at=number, near="made/")
    if killed.status != -signal.SIGKILL:
        assert killed.status == 0, killed.errors
    again = napkin.run(*command)
    # What the killed process has finished is not overwritten.
    assert again.status == 0 or "exists and is not overwritten" in again.errors[0], (number, again.errors)
    return killed.status == -signal.SIGKILL


def files_after(napkin: Napkin, uninterrupted: Path, what: str) -> set[str]:
    """The files after a command that nothing happened to."""
    assert not kill_and_repeat(napkin, uninterrupted, what, 10**6)
    return files_of(napkin.folder / "made")


@pytest.mark.parametrize("what", ["tokenizer encode", "export", "runs --page"])
def test_a_command_killed_while_it_writes_leaves_nothing_once_it_is_repeated(
    napkin: Napkin, uninterrupted: Path, what: str
) -> None:
    (napkin.folder / "text.txt").write_text("<|endoftext|>\n".join(f"Fox {n} and dog {n}.\n" for n in range(500)))
    expected = files_after(napkin, uninterrupted, what)
    assert kill_and_repeat(napkin, uninterrupted, what, {"tokenizer encode": 3, "export": 14, "runs --page": 14}[what])
    assert files_of(napkin.folder / "made") == expected


@pytest.mark.torture
@pytest.mark.parametrize("what", COMMANDS)
def test_a_command_killed_at_any_moment_leaves_nothing_once_it_is_repeated(
    napkin: Napkin, uninterrupted: Path, what: str
) -> None:
    (napkin.folder / "text.txt").write_text("<|endoftext|>\n".join(f"Fox {n} and dog {n}.\n" for n in range(500)))
    expected = files_after(napkin, uninterrupted, what)
    number = 1
    while kill_and_repeat(napkin, uninterrupted, what, number):
        assert files_of(napkin.folder / "made") == expected, number
        number += 1
        assert number < MOST_OPERATIONS
    assert number > 3
