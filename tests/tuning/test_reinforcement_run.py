"""A run of reinforcement learning: its figures, its answers, and what a resumed one ends with."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from napkin.errors import NapkinError
from napkin.recipe.tuning_recipe import AdapterConfig, ReinforcementConfig, ReinforcementRecipe
from napkin.runs.metrics import read_metrics
from napkin.runs.run_record import read_run_record
from napkin.training.run import open_run, train, train_run
from napkin.tuning.method import tune
from oracles.tiny_run import tiny_recipe, write_tiny_text
from oracles.tiny_tuning import tuning_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a start that has room for a question and its answer."""
    path = tmp_path_factory.mktemp("reinforcement")
    write_tiny_text(path)
    recipe = tiny_recipe(path, steps=2)
    train(dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, context_length=40)), path / "start")
    return path


def rl_recipe(folder: Path, rl: Any = None, **training: Any) -> ReinforcementRecipe:
    recipe = tuning_recipe(folder, "rl", **{"batch_size": 2, **training})
    assert isinstance(recipe, ReinforcementRecipe)
    config = {"environment": "arithmetic:1", "group_size": 3, "max_answer": 6, "evaluation_prompts": 5, **(rl or {})}
    return dataclasses.replace(recipe, data=ReinforcementRecipe().data, rl=ReinforcementConfig(**config))


def weights(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step-{step:08d}" / "model.safetensors").read_bytes()


@pytest.mark.thorough
def test_a_resumed_run_ends_with_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    # The last checkpoint before the end is in the middle of a rollout's updates.
    rl = {"updates_per_rollout": 2, "epochs": 2, "algorithm": "dr-grpo", "kl_weight": 0.01}
    recipe = rl_recipe(folder, rl, steps=4)
    messages: list[str] = []
    tune(recipe, tmp_path / "whole", on_message=messages.append)
    assert any(message.startswith("before the first step: held-out reward 0.") for message in messages)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-00000004")
    outcome = train_run(*open_run(tmp_path / "resumed"))
    assert outcome.first_step == 3
    assert weights(tmp_path / "resumed", 4) == weights(tmp_path / "whole", 4)
    whole, resumed = (list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("whole", "resumed"))
    assert [line.figures for line in whole] == [line.figures for line in resumed]
    assert {"reward", "entropy", "kl", "clip_share", "sampler_gap", "cut_share"} <= set(whole[0].figures or {})
    held_out = [line.step for line in whole if "held-out correct" in (line.figures or {})]
    assert held_out == [1, 3, 4]
    lines = (tmp_path / "whole" / "answers" / "step-00000004.jsonl").read_text().splitlines()
    assert len(lines) == 5
    answer = json.loads(lines[0])
    assert [message["role"] for message in answer["messages"]] == ["user", "assistant"]
    assert answer["reward"] in (0, 1)


def test_what_cannot_be_learned_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    for rl, named in (
        ({"group_size": 1}, "rl.group_size is 1"),
        ({"environment": "arithmetik"}, "'arithmetik' is not an environment"),
        ({"max_answer": 0}, "rl.max_answer is 0"),
    ):
        with pytest.raises(NapkinError, match=named.replace(".", r"\.")):
            tune(rl_recipe(folder, rl), tmp_path / "run")
    recipe = rl_recipe(folder)
    with pytest.raises(NapkinError, match="reinforcement learning"):
        tune(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, train="a.jsonl")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("kl_weight", "adapter"), [(0.1, "lora"), (0.0, "none"), (0.1, "none")])
def test_the_books_of_each_phase_are_closed(folder: Path, tmp_path: Path, kl_weight: float, adapter: Any) -> None:
    """At a rate so small that all steps answer as the trial did, count and meter are of the same tokens; a reference is
    a second model, or the model itself without adapters."""
    prompts = [{"prompt": f"{'7' * (n % 4)}{n}?", "answer": "1"} for n in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    rl = {"environment": str(tmp_path / "prompts.jsonl"), "epochs": 2, "updates_per_rollout": 2, "kl_weight": kl_weight}
    recipe = rl_recipe(folder, rl, steps=4, evaluate_every=4, checkpoint_every=4)
    recipe = dataclasses.replace(
        recipe,
        adapter=AdapterConfig(adapter, rank=2),
        optimizer=dataclasses.replace(recipe.optimizer, learning_rate=1e-12),
        # Several micro-batches.
        tuning=dataclasses.replace(recipe.tuning, micro_batch_tokens=60),
    )
    rows = {row.quantity: row for row in tune(recipe, tmp_path / "run").table}
    for phase in ("rollout", "log-probabilities", "update"):
        for quantity in ("tokens", "FLOPs"):
            row = rows[f"{phase}: {quantity}"]
            assert row.count == row.meter, (phase, quantity)
        peak = rows[f"{phase}: peak bytes"]
        # The count holds the tokens of a step, some kilobytes, which the meter does not see.
        assert peak.meter == pytest.approx(peak.count, rel=0.01, abs=5e3), phase
        assert (rows[f"{phase}: seconds"].count or 0) > 0
        assert (rows[f"{phase}: seconds"].meter or 0) > 0
    assert rows["peak bytes"].meter == pytest.approx(rows["peak bytes"].count, rel=0.01)
    # A step is all of its phases, in each column.
    phases = ("rollout", "log-probabilities", "update")
    for quantity in ("tokens", "FLOPs"):
        row = rows[f"{quantity} per step"]
        for column in ("rule", "count", "meter"):
            each = [getattr(rows[f"{phase}: {quantity}"], column) for phase in phases]
            assert getattr(row, column) == sum(each), (quantity, column)
    plan = read_run_record(tmp_path / "run").plan
    assert plan is not None
    assert sum(plan.flops_by_phase.values()) == rows["FLOPs per step"].count
    assert "the longest completions" in rows["FLOPs per step"].note
    assert {"rollout", "log-probabilities", "forward", "backward"} <= set(plan.flops_by_phase)
    assert plan.tokens_per_step == rows["tokens per step"].count
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    # The prompts of the plan are those of the third step; others have their own lengths.
    by_hand = sum(plan.flops_by_phase.values()) / lines[2].step_seconds / plan.device.matmul_peak
    assert lines[2].mfu == pytest.approx(by_hand)
    assert len({round(line.mfu * line.step_seconds, 12) for line in lines}) > 1


@pytest.mark.thorough
def test_a_run_that_could_not_learn_says_so_and_a_changed_reward_is_another_run(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def same(answer, reference):\n    return 0.5\n")
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n}?", "answer": "1"}) for n in range(9)))
    rl = {"environment": str(tmp_path / "prompts.jsonl"), "reward": f"{own}:same", "evaluation_prompts": 0}
    messages: list[str] = []
    tune(rl_recipe(folder, rl, steps=4, checkpoint_every=2), tmp_path / "run", on_message=messages.append)
    assert any(message.startswith("in 4 of 4 steps all completions of each prompt had") for message in messages)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    own.write_text("def same(answer, reference):\n    return 1.0\n")
    with pytest.raises(NapkinError):
        train_run(*open_run(tmp_path / "run"))


@pytest.mark.thorough
def test_a_reward_that_raises_is_0_counted_in_each_step_and_named_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def broken(answer, reference):\n    return 1 / 0\n")
    prompts = [{"prompt": f"{n}?", "answer": str(n)} for n in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    rl = {"environment": str(tmp_path / "prompts.jsonl"), "reward": f"{tmp_path / 'own.py'}:broken"}
    recipe = rl_recipe(folder, {**rl, "evaluation_prompts": 0}, steps=2, evaluate_every=2, checkpoint_every=2)
    messages: list[str] = []
    tune(recipe, tmp_path / "run", on_message=messages.append)
    named = [message for message in messages if "ZeroDivisionError" in message]
    assert named == ["a reward could not be computed and counts as 0: ZeroDivisionError: division by zero"]
    metrics = [line.figures or {} for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert [(each["reward"], each["reward_failures"]) for each in metrics] == [(0, 6), (0, 6)]
