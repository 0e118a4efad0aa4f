"""A run of tuning: planned, metered, reconciled, and resumed to the bit."""

import json
import re
import shutil
from pathlib import Path

import pytest

from napkin.chats.read_conversations import read_chats
from napkin.errors import NapkinError
from napkin.inference.loaded_model import load
from napkin.runs.metrics import read_metrics
from napkin.training.run import open_run, train_run
from napkin.tuning.method import encoder_of_run, tune
from oracles.tiny_tuning import make_start, tuning_recipe, write_conversations


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuning")
    make_start(path)
    write_conversations(path / "train.jsonl", 10)
    write_conversations(path / "held_out.jsonl", 5, seed=1)
    return path


def weights(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step-{step:08d}" / "model.safetensors").read_bytes()


def test_a_run_learns_its_conversations_and_its_books_are_closed(folder: Path, tmp_path: Path) -> None:
    outcome = tune(tuning_recipe(folder, steps=30), tmp_path / "run")
    rows = {row.quantity: row for row in outcome.table}
    assert rows["FLOPs per step"].count == rows["FLOPs per step"].meter
    peak = rows["peak bytes"]
    assert peak.meter == pytest.approx(peak.count, rel=0.01)
    metrics = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert metrics[-1].loss < metrics[0].loss
    assert metrics[-1].validation_loss is not None
    assert metrics[-1].epochs == pytest.approx(30 * 4 / 10)
    # 120 conversations are 12 times all of them.
    encoder = encoder_of_run(tmp_path / "run", load(tmp_path / "run").tokenizer)
    learned = [encoder.sequence(each.messages).n_trained for each in read_chats(folder / "train.jsonl")]
    assert metrics[-1].tokens == 12 * sum(learned)
    assert load(tmp_path / "run").step == 30


def test_a_run_that_is_resumed_ends_with_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    recipe = tuning_recipe(folder)
    tune(recipe, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-00000006")
    outcome = train_run(*open_run(tmp_path / "resumed"))
    assert outcome.first_step == 3
    assert weights(tmp_path / "resumed", 6) == weights(tmp_path / "whole", 6)
    lines = [list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("whole", "resumed")]
    assert [line.loss for line in lines[0]] == [line.loss for line in lines[1]]
    assert [line.tokens for line in lines[0]] == [line.tokens for line in lines[1]]


@pytest.mark.thorough
def test_a_folder_of_another_recipe_is_refused(folder: Path, tmp_path: Path) -> None:
    tune(tuning_recipe(folder, steps=3), tmp_path / "run")
    with pytest.raises(NapkinError, match=re.escape("is a run of another recipe: there training.steps is 3, not 4")):
        tune(tuning_recipe(folder, steps=4), tmp_path / "run")


@pytest.mark.thorough
def test_what_cannot_be_tuned_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NapkinError, match=r"training\.compile is 'on'"):
        tune(tuning_recipe(folder, compile="on"), tmp_path / "run")
    with pytest.raises(NapkinError, match=r"--tuning\.micro-batch-tokens"):
        tune(tuning_recipe(folder, micro_batch_size=2), tmp_path / "run")
    with pytest.raises(NapkinError, match=r"model.*start"):
        tune(tuning_recipe(folder, tuning={"start": ""}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_a_tuned_run_remembers_its_recipe(folder: Path, tmp_path: Path) -> None:
    tune(tuning_recipe(folder, steps=3), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "conversation.json").read_text())["format"] == "napkin-conversation"
    assert 'method = "sft"' in (tmp_path / "run" / "recipe.toml").read_text()
