"""Files that are not what they were, and requests that make no sense: one line, status 2, nothing lost."""

import random
import shutil
import signal
from pathlib import Path

import pytest

from reliability.harness import (
    Command,
    Napkin,
    assert_same_run,
    checkpoints,
    figures,
    lines_of_metrics,
    start_python,
    wait_until,
)

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS")


@pytest.fixture
def run(napkin: Napkin, uninterrupted: Path) -> Path:
    """A copy of the finished run, with the checkpoints of steps 36 and 40."""
    shutil.copytree(uninterrupted, napkin.folder / "run")
    assert checkpoints(napkin.folder / "run") == [36, 40]
    return napkin.folder / "run"


def open_the_books(run: Path) -> None:
    """Remove the report, so that resuming opens the text again: a run with closed books needs it no more."""
    (run / "report.html").unlink()


def spoil(file: Path, draw: random.Random) -> None:
    """Cut a file, flip one of its bits, or remove it."""
    data = bytearray(file.read_bytes())
    how = draw.choice(["cut", "flip", "remove"])
    if how == "cut":
        file.write_bytes(data[: draw.randrange(len(data))])
    elif how == "flip":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
    else:
        file.unlink()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_refused(command: Command, *words: str) -> None:
    assert command.status == 2
    assert len(command.errors) == 1, command.errors
    for word in words:
        assert word in command.errors[0]


def go_on_from_the_one_before(napkin: Napkin, run: Path, uninterrupted: Path, name: str, seed: int) -> None:
    spoil(run / "checkpoints" / "step-00000040" / name, random.Random(f"{name} {seed}"))
    resumed = napkin.run("resume", "run")
    assert resumed.status == 0
    assert len(resumed.errors) == 1
    assert name in resumed.errors[0]
    assert "skipped for 'step-00000036'" in resumed.errors[0]
    assert_same_run(run, uninterrupted)
    assert checkpoints(run) == [36, 40]
    assert (run / "checkpoints" / "damaged-step-00000040").is_dir()


@pytest.mark.parametrize("name", ["optimizer.safetensors"])
def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(
    napkin: Napkin, run: Path, uninterrupted: Path, name: str
) -> None:
    go_on_from_the_one_before(napkin, run, uninterrupted, name, 0)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", FILES)
def test_any_damage_to_a_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(
    napkin: Napkin, run: Path, uninterrupted: Path, name: str, seed: int
) -> None:
    go_on_from_the_one_before(napkin, run, uninterrupted, name, seed)


def test_where_all_checkpoints_are_damaged_nothing_is_touched(napkin: Napkin, run: Path) -> None:
    for step in (36, 40):
        (run / "checkpoints" / f"step-{step:08d}" / "model.safetensors").write_bytes(b"")
    before = contents(run)
    for command in ("resume", "evaluate", "generate"):
        assert_refused(napkin.run(command, "run"), "/model.safetensors")
    assert contents(run) == before


def test_two_processes_do_not_train_one_run(napkin: Napkin, uninterrupted: Path) -> None:
    first = napkin.start("train", "recipe.toml", "--run", "run")
    wait_until(lambda: lines_of_metrics(napkin.folder / "run") >= 1, first)
    # Stopped, it holds the run and cannot end before the second one has tried.
    first.send(signal.SIGSTOP)
    assert_refused(napkin.run("resume", "run"), "'run' is being trained by another process")
    assert_refused(napkin.run("train", "recipe.toml", "--run", "run"), "napkin resume run")
    first.send(signal.SIGCONT)
    assert first.wait() == 0
    assert_same_run(napkin.folder / "run", uninterrupted)


def test_a_run_that_was_moved_resumes_where_it_lies(napkin: Napkin, uninterrupted: Path) -> None:
    stopped = napkin.run(
        "train", "recipe.toml", "--run", "run", signal_at=3, near=".step-00000012.", signal=signal.SIGTERM
    )
    assert stopped.status == 128 + signal.SIGTERM
    (napkin.folder / "elsewhere").mkdir()
    (napkin.folder / "run").rename(napkin.folder / "elsewhere" / "another name")
    assert napkin.run("resume", "elsewhere/another name").status == 0
    assert_same_run(napkin.folder / "elsewhere" / "another name", uninterrupted)


def test_a_finished_run_says_so(napkin: Napkin, run: Path, uninterrupted: Path) -> None:
    resumed = napkin.run("resume", "run")
    assert resumed.status == 0
    assert resumed.errors == []
    assert "step 40 of 40" in resumed.out.read_text()
    assert_same_run(run, uninterrupted)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["cut", "altered"])
def test_a_token_file_that_changes_while_the_run_reads_it_ends_it_with_a_line_and_a_checkpoint(
    napkin: Napkin, uninterrupted: Path, how: str
) -> None:
    tokens, run = napkin.folder / "train.tokens", napkin.folder / "run"
    whole = tokens.read_bytes()
    command = napkin.start("train", "recipe.toml", "--run", "run")
    wait_until(lambda: lines_of_metrics(run) >= 8, command)
    with open(tokens, "r+b") as file:
        file.truncate(0) if how == "cut" else file.write(bytes([whole[0] ^ 1]))
    command.wait()
    assert_refused(command, "train.tokens' ", "is saved", "napkin resume" if how == "cut" else "altered")
    assert checkpoints(run)[-1] == figures(run)[-1]["step"]
    tokens.write_bytes(whole)
    assert napkin.run("resume", "run").status == 0
    assert_same_run(run, uninterrupted)


@pytest.mark.torture
def test_pages_lost_in_the_middle_of_an_instruction_end_the_run_with_a_line_and_a_checkpoint(
    napkin: Napkin, uninterrupted: Path
) -> None:
    # The file is cut after it was looked at and before it is read, where nothing but SIGBUS tells.
    tokens, run = napkin.folder / "train.tokens", napkin.folder / "run"
    whole = tokens.read_bytes()
    script = """
import os, sys
from napkin.cli import main
from napkin.data.batches import Batches
read = Batches.__getitem__
def cut_and_read(batches, index):
    if index == 8:
        os.truncate(batches.tokens.files[0].path, 0)
    return read(batches, index)
Batches.__getitem__ = cut_and_read
sys.exit(main(sys.argv[1:]))
"""
    command = start_python(napkin.folder, "-c", script, "train", "recipe.toml", "--run", "run")
    command.wait()
    assert_refused(command, "train.tokens' ", "step 8 is saved", "napkin resume run")
    assert checkpoints(run)[-1] == 8
    tokens.write_bytes(whole)
    assert napkin.run("resume", "run").status == 0
    assert_same_run(run, uninterrupted)


CUT_AND_CALL = """
import os, sys
from napkin.cli import main
from napkin.data.token_file import TokenFile
def cut_before(name):
    whole = getattr(TokenFile, name)
    def cut_and_call(file):
        os.truncate(file.path, 0)
        return whole(file)
    setattr(TokenFile, name, cut_and_call)
cut_before("verify")
cut_before("verify_on_read")
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("command", "name"), [("train", "train.tokens"), ("resume", "train.tokens")])
def test_a_mapped_file_that_is_cut_before_any_step_ends_the_command_with_a_line(
    napkin: Napkin, run: Path, command: str, name: str
) -> None:
    open_the_books(run)
    arguments = ["train", "recipe.toml", "--run", "new"] if command == "train" else ["resume", "run"]
    ended = start_python(napkin.folder, "-c", CUT_AND_CALL, *arguments)
    ended.wait()
    assert_refused(ended, f"{name}' was shortened", "while it was read")


@pytest.mark.torture
def test_a_token_file_that_is_cut_while_it_is_evaluated_changes_nothing(napkin: Napkin, run: Path) -> None:
    expected = napkin.run("evaluate", "run", "--json")
    assert expected.status == 0
    tokens = napkin.folder / "validation.tokens"
    whole = tokens.read_bytes()
    ended = start_python(napkin.folder, "-c", CUT_AND_CALL, "evaluate", "run", "--json")
    assert ended.wait() == 0, ended.errors
    assert ended.out.read_text() == expected.out.read_text()
    tokens.write_bytes(whole)
    script = """
import os, napkin
cut = lambda done, total: os.truncate("validation.tokens", 0)
print(napkin.load("run").evaluate(progress=cut).loss)
"""
    ended = start_python(napkin.folder, "-c", script)
    assert ended.wait() == 0, ended.errors


def test_a_token_file_that_was_altered_between_two_runs_is_refused(napkin: Napkin, run: Path) -> None:
    open_the_books(run)
    tokens = napkin.folder / "train.tokens"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    assert_refused(napkin.run("resume", "run"), "train.tokens' was altered")
    # Another text by the same tokenizer, whole in itself, is another text.
    for suffix in ("", ".json"):
        shutil.copy(napkin.folder / f"validation.tokens{suffix}", napkin.folder / f"train.tokens{suffix}")
    assert_refused(napkin.run("resume", "run"), "the training data is not that of")


@pytest.mark.parametrize(
    ("line", "other", "words"),
    [
        ("n_heads = 4", "n_heads = 2", "model.n_heads is 2, was 4"),
        ("rope_theta = 10000.0", "rope_theta = 5000.0", "model.rope_theta is 5000.0, was 10000.0"),
        ("d_model = 48", "d_model = 64", "model.d_model is 64, was 48"),
    ],
)
def test_a_recipe_that_was_changed_to_another_model_is_refused(
    napkin: Napkin, run: Path, line: str, other: str, words: str
) -> None:
    recipe = run / "recipe.toml"
    assert line in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(line, other))
    before = contents(run)
    for command in ("resume", "evaluate"):
        assert_refused(napkin.run(command, "run"), words)
    assert contents(run) == before


def test_a_recipe_with_more_steps_goes_on_and_says_what_has_changed(napkin: Napkin, run: Path) -> None:
    recipe = run / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("steps = 40", "steps = 44", 1))
    resumed = napkin.run("resume", "run")
    assert resumed.status == 0
    assert len(resumed.errors) == 1
    assert "training.steps is 44, was 40" in resumed.errors[0]
    assert [line["step"] for line in figures(run)] == list(range(1, 45))


def test_a_loss_that_is_no_number_ends_the_command_with_one_line(napkin: Napkin) -> None:
    optimizer = ["--optimizer.learning-rate", "10", "--optimizer.weight-decay", "100"]
    command = napkin.run("train", "recipe.toml", "--run", "run", "--training.checkpoint-every", "40", *optimizer)
    assert_refused(command, "lower learning_rate in", "recipe.toml", "are kept")
    assert checkpoints(napkin.folder / "run") == []
