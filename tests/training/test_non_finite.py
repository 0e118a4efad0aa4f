import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import napkin.training.loop as loop
from napkin.data.batches import Batches
from napkin.data.token_file import TokenFile
from napkin.distributed.ranks import Ranks
from napkin.errors import NapkinError
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.runs.metrics import History, read_metrics
from napkin.train_step.step import TrainState, build_train_state
from napkin.training.non_finite import Verdict, find_source, skip_or_stop
from napkin.training.pretraining import Pretraining
from napkin.training.run import create_run, open_run, train_run
from oracles.tiny_run import tiny_recipe, write_tiny_text

TOKENS = torch.randint(0, 17, (4, 33), generator=torch.Generator().manual_seed(0))
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


@pytest.fixture
def train_state() -> TrainState:
    recipe = tiny_recipe(".", precision="fp32")
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, vocab_size=17, n_layers=3))
    return build_train_state(ResolvedRecipe(recipe, Precision("fp32", "cpu")))


def step_again(train_state: TrainState, *batch: Tensor) -> Callable[[], Tensor]:
    inputs, targets = batch or (INPUTS, TARGETS)
    return lambda: train_state.step(0, inputs, targets, is_fit=lambda loss, norm: False)[0]


def linear_layers(train_state: TrainState) -> list[str]:
    return [
        name for name, module in train_state.model.named_modules() if hasattr(module, "weight") and "blocks" in name
    ]


def test_the_first_module_whose_output_overflows_is_named(train_state: TrainState) -> None:
    for name in linear_layers(train_state):
        module = train_state.model.get_submodule(name)
        kept = module.weight.detach().clone()  # pyright: ignore[reportCallIssue]
        with torch.no_grad():
            module.weight.fill_(3e38)  # pyright: ignore[reportCallIssue, reportArgumentType]
        assert f"in the output of '{name}'" in find_source(train_state, step_again(train_state))
        with torch.no_grad():
            module.weight.copy_(kept)  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert "all gradients being finite" in find_source(train_state, step_again(train_state))


def test_weights_that_are_no_numbers_are_named(train_state: TrainState) -> None:
    with torch.no_grad():
        train_state.model.blocks[1].feed_forward.down.weight[0, 0] = float("nan")  # pyright: ignore
    assert "weights 'blocks.1.feed_forward.down.weight'" in find_source(train_state, step_again(train_state))


def test_a_gradient_that_is_no_number_behind_finite_outputs_is_named(train_state: TrainState) -> None:
    def spoil_gradient(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        # The root's slope at 0 is infinite.
        return output + (output - output.detach()).abs().sqrt().sum()

    train_state.model.get_submodule("blocks.1.feed_forward").register_forward_hook(spoil_gradient)
    source = find_source(train_state, step_again(train_state))
    assert "in the gradient of 'blocks.1.feed_forward." in source


def test_looking_for_the_source_changes_nothing(train_state: TrainState) -> None:
    before = [parameter.detach().clone() for parameter in train_state.model.parameters()]
    find_source(train_state, step_again(train_state))
    for parameter, kept in zip(train_state.model.parameters(), before, strict=True):
        assert torch.equal(parameter, kept)
        assert parameter.grad is None
    assert train_state.optimizer.param_groups[0]["step"] == 0
    assert not any(module._forward_hooks for module in train_state.model.modules())


@pytest.fixture
def poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """A recipe some of whose steps' forward passes make NaN in the first block."""
    write_tiny_text(tmp_path)

    def make(bad_steps: set[int], factor: float = float("nan"), **training: Any) -> Recipe:
        def build(resolved: ResolvedRecipe, ranks: Ranks, **options: Any) -> TrainState:
            train_state = build_train_state(resolved, ranks, **options)
            bad = {bytes(batches[number - 1][0].numpy()) for number in bad_steps}

            def poison(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
                nonlocal is_bad
                is_bad = bytes(inputs[0].numpy()) in bad
                return output * factor if is_bad and math.isnan(factor) else None

            def scale(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
                return output * factor if is_bad else None

            is_bad = False
            train_state.model.embedding.register_forward_hook(poison)
            train_state.model.norm.register_forward_hook(scale)
            return train_state

        recipe = tiny_recipe(tmp_path, **({"steps": 12, "checkpoint_every": 5, "evaluate_every": 6} | training))
        tokens = TokenFile.open(tmp_path / "train.tokens")
        batches = Batches(tokens, context_length=32, batch_size=recipe.training.batch_size, seed=0)
        monkeypatch.setattr(loop, "build_train_state", build)
        return recipe

    return make


@pytest.mark.thorough
def test_a_bad_batch_stops_the_run_by_name_and_is_kept(poisoned: Callable[..., Recipe], tmp_path: Path) -> None:
    preparation, run = create_run(poisoned({8}), tmp_path / "run")
    assert isinstance(preparation, Pretraining)
    with pytest.raises(NapkinError, match=r"^step 8.*'embedding'.*is.*'") as caught:
        train_run(preparation, run)
    kept = run.path / "non-finite" / "step-00000008.safetensors"
    assert str(kept) in str(caught.value)
    inputs, targets = preparation.batches[7]
    found = load_file(kept)
    assert torch.equal(found["inputs"], inputs)
    assert torch.equal(found["targets"], targets)
    story = json.loads(kept.with_suffix(".json").read_text())
    assert (story["step"], story["batch"], story["loss"]) == (8, 7, "nan")
    assert story["seeds"] == {"init_seed": 0, "data_seed": 0, "dropout_seed": 0, "rounding_seed": 0}
    assert [line.step for line in read_metrics(run.path / "metrics.jsonl")] == list(range(1, 8))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "fp8"])
def test_what_is_kept_names_the_precision_that_ran(
    poisoned: Callable[..., Recipe], tmp_path: Path, precision: str
) -> None:
    preparation, run = create_run(poisoned({1}, precision=precision), tmp_path / "run")
    with pytest.raises(NapkinError, match=r"^step 1"):
        train_run(preparation, run)
    story = json.loads((run.path / "non-finite" / "step-00000001.json").read_text())
    assert story["precision"] == precision


@pytest.mark.thorough
def test_a_skipped_step_is_as_if_its_update_had_never_been_due(poisoned: Callable[..., Recipe], tmp_path: Path) -> None:
    preparation, run = create_run(poisoned({4, 8, 9}, on_non_finite="skip"), tmp_path / "run")
    assert isinstance(preparation, Pretraining)
    messages: list[str] = []
    outcome = train_run(preparation, run, on_message=messages.append)
    assert [message.split(":")[0] for message in messages] == ["step 4", "step 8", "step 9"]
    assert "(2 in a row)" in messages[2]
    lines = list(read_metrics(run.path / "metrics.jsonl"))
    assert [line.step for line in lines] == list(range(1, 13))
    assert [line.step for line in lines if line.skipped] == [4, 8, 9]
    assert all(line.loss != line.loss for line in lines if line.skipped)
    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    # By hand: the same steps, and nothing at all where one was bad.
    by_hand = build_train_state(ResolvedRecipe(preparation.recipe, preparation.precision))
    for number in range(12):
        if number + 1 not in (4, 8, 9):
            by_hand.step(number, *preparation.batches[number])
    for found, expected in zip(outcome.train_state.model.parameters(), by_hand.model.parameters(), strict=True):
        assert torch.equal(found, expected)
    assert outcome.train_state.optimizer.param_groups[0]["step"] == 9


@pytest.mark.torture
def test_a_run_with_skipped_steps_resumes_bit_for_bit(poisoned: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = poisoned({4, 8, 9}, on_non_finite="skip")
    whole = train_run(*create_run(recipe, tmp_path / "whole"))
    preparation, run = create_run(recipe, tmp_path / "run")

    class Stop(Exception): ...

    def stop(metrics: Any) -> None:
        if metrics.step in (7, 11):
            raise Stop

    with pytest.raises(Stop):
        train_run(preparation, run, on_step=stop)
    with pytest.raises(Stop):
        train_run(*open_run(run.path), on_step=lambda metrics: stop(metrics) if metrics.step == 11 else None)
    resumed = train_run(*open_run(run.path))
    assert resumed.first_step == 10
    for found, expected in zip(
        resumed.train_state.model.parameters(), whole.train_state.model.parameters(), strict=True
    ):
        assert torch.equal(found, expected)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (resumed.checkpoint / name).read_bytes() == (whole.checkpoint / name).read_bytes()


@pytest.mark.thorough
def test_too_many_skipped_steps_in_a_row_stop_the_run(poisoned: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = poisoned({2, 4, 5, 6}, on_non_finite="skip", most_skipped=2)
    preparation, run = create_run(recipe, tmp_path / "run")
    with pytest.raises(NapkinError, match=r"6: .*raise most_skipped.*2.*`napkin"):
        train_run(preparation, run)


@pytest.mark.thorough
def test_a_loss_that_stands_out_is_marked_in_the_metrics_also_after_a_resume(
    poisoned: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = poisoned({21, 24}, factor=1000.0, steps=26, checkpoint_every=22, evaluate_every=100, log_every=5)
    preparation, run = create_run(recipe, tmp_path / "run")
    train_run(preparation, run)
    expected = {line.step: line.spike for line in read_metrics(run.path / "metrics.jsonl")}
    assert [step for step, score in expected.items() if score is not None] == [21, 24]
    assert list(expected) == [5, 10, 15, 20, 21, 24, 25, 26]
    # What is usual is known from the checkpoint: the marks are those of the run that was never stopped.
    shutil.rmtree(run.checkpoints / "step-00000026")
    assert train_run(*open_run(run.path)).first_step == 22
    assert {line.step: line.spike for line in read_metrics(run.path / "metrics.jsonl")} == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "fp8"])
def test_what_is_kept_of_a_step_names_the_precision_that_ran(tmp_path: Path, precision: str) -> None:
    write_tiny_text(tmp_path)
    recipe = tiny_recipe(tmp_path, precision=precision, device="cpu")
    preparation, run = create_run(recipe, tmp_path / "run")
    train_state = build_train_state(ResolvedRecipe(preparation.recipe, preparation.precision))
    with torch.no_grad():
        train_state.model.blocks[0].feed_forward.down.weight.fill_(float("nan"))  # pyright: ignore
    verdict = Verdict()
    batch = (torch.zeros(4, 32, dtype=torch.int64), torch.zeros(4, 32, dtype=torch.int64))
    train_state.step(0, *batch, is_fit=verdict)
    again = step_again(train_state, *batch)
    with pytest.raises(NapkinError):
        skip_or_stop(train_state, History(), run, 0, {"inputs": batch[0]}, verdict, again, print)
    [story] = (run.path / "non-finite").glob("*.json")
    assert json.loads(story.read_text())["precision"] == precision
