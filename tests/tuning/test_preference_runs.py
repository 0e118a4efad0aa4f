"""Runs on preferences: what they learn, their books, and that a resumed run ends with the same bytes."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from napkin.accounting.metering import meter_step
from napkin.chats.token_sequence import Example
from napkin.errors import NapkinError
from napkin.recipe.tuning_recipe import PreferenceConfig, PreferenceObjective, PreferenceRecipe, TuningRecipe
from napkin.runs.metrics import read_metrics
from napkin.training.run import create_run, open_run, train_run
from napkin.tuning.example_method import ExampleMethod
from napkin.tuning.method import tune
from napkin.tuning.sequence_step import score_examples
from oracles.tiny_tuning import make_start, tuning_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("preferences")
    make_start(path)
    write_pairs(path / "train.jsonl", 12)
    write_pairs(path / "held_out.jsonl", 6, seed=1)
    return path


def write_pairs(path: Path, n: int, seed: int = 0) -> None:
    """Pairs of which the chosen answer is always of a and b, the rejected one of c and d."""
    draw = random.Random(seed)

    def text(letters: str) -> str:
        return "".join(draw.choices(letters, k=draw.randint(2, 5)))

    pairs = [{"prompt": text("ef"), "chosen": text("ab"), "rejected": text("cd")} for _ in range(n)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def recipe_of(folder: Path, objective: PreferenceObjective, beta: float = 0.1, **training: object) -> TuningRecipe:
    recipe = tuning_recipe(folder, "preference", **training)
    assert isinstance(recipe, PreferenceRecipe)
    return recipe.__class__(**{**vars(recipe), "preference": PreferenceConfig(objective, beta=beta)})


@pytest.mark.thorough
def test_a_run_learns_preferences_and_its_books_are_closed(folder: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    preparation, run = create_run(recipe_of(folder, "dpo", steps=30), tmp_path / "run")
    outcome = train_run(preparation, run, on_message=messages.append)
    metrics = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    # Before the first update the model is its reference.
    assert metrics[0].loss == pytest.approx(np.log(2), abs=1e-6)
    last = metrics[-1].figures
    assert last is not None
    assert last["held-out accuracy"] == 1
    assert last["margin"] is not None
    assert last["margin"] > 0
    assert metrics[-1].validation_loss is not None
    rows = {row.quantity: row for row in outcome.table}
    assert rows["FLOPs per step"].count == rows["FLOPs per step"].meter
    assert rows["peak bytes"].meter == pytest.approx(rows["peak bytes"].count, rel=0.01)
    assert len([message for message in messages if "log-probabilities of the reference" in message]) == 2

    # The reference's pass was planned as what it has been.
    method, model = preparation, outcome.train_state.parallel_model
    assert isinstance(method, ExampleMethod)
    everything = [*method.examples, *method.held_out]
    assert rows["reference: tokens"].count == rows["reference: tokens"].meter == tokens_in(everything)
    assert rows["reference: seconds"].meter is not None
    metered = meter_step(model.model, lambda: score_examples(model, everything, max_tokens=method.max_tokens))
    assert metered.ledger.flops == pytest.approx(rows["reference: FLOPs"].count, rel=0.1)
    one_step, in_all = (rows[name].count for name in ("seconds per step", "seconds in all"))
    assert in_all == pytest.approx(30 * (one_step or 0) + (rows["reference: seconds"].count or 0))


def tokens_in(examples: Sequence[Example]) -> int:
    return sum(len(sequence.tokens) for example in examples for sequence in example)


@pytest.mark.thorough
def test_a_run_that_is_resumed_ends_with_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    whole = {row.quantity: row for row in tune(recipe_of(folder, "kto"), tmp_path / "whole").table}
    # The pass over mismatched answers is part of the step.
    assert whole["FLOPs per step"].count == whole["FLOPs per step"].meter
    assert whole["peak bytes"].meter == pytest.approx(whole["peak bytes"].count, rel=0.01)
    assert whole["reference: tokens"].count == whole["reference: tokens"].meter
    expected = (tmp_path / "whole" / "checkpoints" / "step-00000006" / "model.safetensors").read_bytes()
    for name, kept in (("read", True), ("computed", False)):
        run = tmp_path / name
        shutil.copytree(tmp_path / "whole", run)
        shutil.rmtree(run / "checkpoints" / "step-00000006")
        reference = run / "reference-train.safetensors"
        before = reference.read_bytes()
        if not kept:
            # Damaged: the model that the run has started from computes it again.
            reference.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        messages: list[str] = []
        outcome = train_run(*open_run(run), on_message=messages.append)
        assert outcome.first_step == 3
        assert (run / "checkpoints" / "step-00000006" / "model.safetensors").read_bytes() == expected
        assert reference.read_bytes() == before
        assert any("is computed again: it is damaged" in message for message in messages) is not kept


@pytest.mark.thorough
def test_a_reward_model_learns_which_answer_is_better(folder: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    outcome = tune(tuning_recipe(folder, "reward-model", steps=30), tmp_path / "run", on_message=messages.append)
    metrics = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    # The head starts at 0 everywhere.
    assert metrics[0].loss == pytest.approx(np.log(2), abs=1e-6)
    assert metrics[-1].figures is not None
    assert metrics[-1].figures["held-out accuracy"] == 1
    rows = {row.quantity: row for row in outcome.table}
    assert rows["FLOPs per step"].count == rows["FLOPs per step"].meter
    calibration = json.loads((tmp_path / "run" / "calibration.json").read_text())
    assert calibration["loss"] == pytest.approx(metrics[-1].validation_loss, rel=1e-5)
    assert sum(each["pairs"] for each in calibration["bins"]) == 6
    assert any("6 held-out pairs: accuracy 1.000" in message for message in messages)


def test_what_cannot_be_learned_from_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "same.jsonl"
    empty.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "b"}) + "\n")
    recipe = recipe_of(folder, "dpo")
    changed = recipe.__class__(**{**vars(recipe), "data": recipe.data.__class__(str(empty), None, "")})
    with pytest.raises(NapkinError, match=r"pairs.*train.*1"):
        tune(changed, tmp_path / "run")
    unread = tuning_recipe(folder, "preference", tuning={"normalisation": "sequence"})
    with pytest.raises(NapkinError, match=r"tuning\.normalisation.*'sequence'.*objectives"):
        tune(unread, tmp_path / "run")
    assert not (tmp_path / "run").exists()
