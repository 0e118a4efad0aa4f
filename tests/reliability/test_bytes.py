"""Bits of a checkpoint that are not as they were written, or never were napkin's: never loaded, never run."""

import dataclasses
import json
import pickle
import random
import shutil
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from napkin.checkpoint.folder import read_checkpoint
from napkin.checkpoint.restore import restore_newest
from napkin.checkpoint.writer import save_checkpoint
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig
from napkin.train_step.step import TrainState, build_train_state
from napkin.training.run import create_run, open_run, train_run
from oracles.tiny_run import MODEL, TRAINING, tiny_recipe, write_tiny_text
from reliability.conftest import Tally
from reliability.harness import Napkin, assert_same_run, checkpoints

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS")
Spoil = Callable[[bytes, random.Random], bytes]


def make_learner(seed: int = 0) -> TrainState:
    model = dataclasses.replace(MODEL, vocab_size=17, d_model=8, n_heads=2, n_kv_heads=1)
    training = dataclasses.replace(TRAINING, init_seed=seed, precision="fp32")
    optimizer = OptimizerConfig(warmup_steps=0, average_decay=0.9)
    return build_train_state(
        ResolvedRecipe(Recipe(model=model, optimizer=optimizer, training=training), Precision("fp32", "cpu"))
    )


def tensors(train_state: TrainState) -> list[torch.Tensor]:
    assert train_state.average is not None
    moments = [t for p in train_state.model.parameters() for t in train_state.optimizer.state[p].values()]
    return [*train_state.model.parameters(), *moments, *train_state.average.averages]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    """A folder with the checkpoints of steps 1 and 2, and what was saved at step 1."""
    folder, train_state = tmp_path_factory.mktemp("checkpoints"), make_learner()
    saved: list[torch.Tensor] = []
    for number in range(2):
        tokens = torch.randint(0, 17, (4, 33), generator=torch.Generator().manual_seed(number))
        train_state.step(number, tokens[:, :-1], tokens[:, 1:])
        save_checkpoint(folder, train_state, step=number + 1, seconds=1.0, tokenizer="t", train_tokens="d")
        saved = saved or [tensor.detach().clone() for tensor in tensors(train_state)]
    return folder, saved


def flip(data: bytes, draw: random.Random) -> bytes:
    position, bit = draw.randrange(len(data)), draw.randrange(8)
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize(("how", "case"), [(flip, "a bit flipped"), (cut, "a file truncated")])
@pytest.mark.parametrize("name", FILES)
def test_damage_anywhere_in_a_checkpoint_leads_to_the_one_before(
    two_checkpoints: tuple[Path, list[torch.Tensor]], tmp_path: Path, name: str, how: Spoil, case: str, tally: Tally
) -> None:
    folder, saved = two_checkpoints
    draw, train_state, tries = random.Random(f"{name} {case}"), make_learner(seed=1), 50
    for number in range(tries):
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        damaged = copy / "step-00000002" / name
        damaged.write_bytes(how(damaged.read_bytes(), draw))
        messages: list[str] = []
        found = restore_newest(copy, train_state, tokenizer="t", train_tokens="d", on_message=messages.append)
        assert found is not None
        assert found.state.step == 1
        assert name in messages[0]
        assert (copy / "damaged-step-00000002").is_dir()
        for tensor, expected in zip(tensors(train_state), saved, strict=True):
            assert torch.equal(tensor, expected)
    tally(f"{case} in {name}", tries)


class Bomb:
    """What would run if somebody unpickled it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("name", [FILES[0], *(pytest.param(name, marks=pytest.mark.torture) for name in FILES[1:3])])
def test_a_checkpoint_from_anybody_is_opened_without_running_its_code(
    napkin: Napkin, uninterrupted: Path, name: str, tally: Tally
) -> None:
    run, marker = napkin.folder / "run", napkin.folder / "marker"
    shutil.copytree(uninterrupted, run)
    # Without it the books are open, and resuming restores the checkpoint.
    (run / "report.html").unlink()
    newest = run / "checkpoints" / "step-00000040"
    bomb = pickle.dumps(Bomb(marker))
    (newest / name).write_bytes(bomb)
    for other in ("model.pt", "optimizer.pkl", ".metadata"):
        (newest / other).write_bytes(bomb)
    # Its sums are right: whoever made it made them too.
    sums = "".join(f"{sha256((newest / file).read_bytes()).hexdigest()}  {file}\n" for file in FILES[:3])
    (newest / "SHA256SUMS").write_text(sums)
    resumed = napkin.run("resume", "run")
    assert resumed.status == 0
    assert name in resumed.errors[0]
    assert not marker.exists()
    assert_same_run(run, uninterrupted)
    tally("a pickle in place of a file, its sums right")


@pytest.mark.thorough
def test_training_and_resuming_read_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_text(tmp_path)
    preparation, run = create_run(tiny_recipe(tmp_path, steps=8), tmp_path / "run")

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pickle is read")

    for module, names in ((pickle, ("load", "loads", "Unpickler")), (torch, ("load",))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    found: list[str] = []
    watching = True
    # However it is reached, from C too.
    sys.addaudithook(lambda event, _: found.append(event) if watching and event == "pickle.find_class" else None)
    train_run(preparation, run)
    shutil.rmtree(run.checkpoints / "step-00000008")
    assert train_run(*open_run(run.path)).first_step == 6
    watching = False
    assert found == []


def test_a_run_of_before_these_fields_were_there_goes_on_as_it_would_have(napkin: Napkin, uninterrupted: Path) -> None:
    run = napkin.folder / "run"
    stopped = napkin.run("train", "recipe.toml", "--run", "run")
    assert stopped.status == 0
    later = ("keep_best", "checkpoint_writing", "on_non_finite", "most_skipped")
    recipe = (run / "recipe.toml").read_text().splitlines(keepends=True)
    (run / "recipe.toml").write_text("".join(line for line in recipe if line.split(" ")[0] not in later))
    shutil.rmtree(run / "checkpoints" / "step-00000040")
    state_file = run / "checkpoints" / "step-00000036" / "state.json"
    state = json.loads(state_file.read_text())
    del state["history"], state["recipe"]["optimizer"]["average_decay"]
    for field in later:
        del state["recipe"]["training"][field]
    state_file.write_text(json.dumps(state, indent=2))
    sums = state_file.with_name("SHA256SUMS")
    lines = [line for line in sums.read_text().splitlines() if "state.json" not in line]
    sums.write_text("\n".join([*lines, f"{sha256(state_file.read_bytes()).hexdigest()}  state.json", ""]))
    assert read_checkpoint(state_file.parent).state.history.validation_losses == []
    resumed = napkin.run("resume", "run")
    assert resumed.status == 0
    assert resumed.errors == []
    assert_same_run(run, uninterrupted)
    assert checkpoints(run)[-1] == 40
