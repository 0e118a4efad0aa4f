"""Checkpoints of runs that train adapters: frozen weights are kept once, and the run needs nothing but its folder."""

import dataclasses
import hashlib
import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from napkin.checkpoint.folder import read_checkpoint
from napkin.checkpoint.restore import load_train_state
from napkin.checkpoint.writer import save_checkpoint
from napkin.errors import CorruptFile, NapkinError
from napkin.inference.loaded_model import load
from napkin.model.transformer import Transformer
from napkin.planning.step.plan_file import describe_checkpoints, whole_checkpoint_bytes
from napkin.planning.step.run_plan import Plan
from napkin.recipe.precision import Precision
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.tuning_recipe import AdapterConfig, TuningRecipe
from napkin.train_step.step import build_train_state
from napkin.training.callbacks import finished_checkpoint
from napkin.training.run import create_run, open_run, train_run
from napkin.tuning.method import open_base, tune
from oracles.tiny_tuning import make_start, tuning_recipe, write_conversations


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    make_start(path)
    write_conversations(path / "train.jsonl", 10)
    write_conversations(path / "held_out.jsonl", 5, seed=1)
    return path


@pytest.fixture(scope="module")
def planned(folder: Path) -> Plan:
    """The plan of a run of bf16 adapters with averages, which has been trained."""
    preparation, run = create_run(lora(folder, precision="bf16"), folder / "tuned")
    train_run(preparation, run)
    assert preparation.plan is not None
    return preparation.plan


@pytest.fixture(scope="module")
def tuned(planned: Plan, folder: Path) -> Path:
    """Its folder."""
    return folder / "tuned"


@pytest.fixture
def run(tuned: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(tuned, tmp_path / "run"))


def lora(folder: Path, **training: Any) -> TuningRecipe:
    recipe = tuning_recipe(folder, steps=2, checkpoint_every=1, evaluate_every=2, **training)
    optimizer = dataclasses.replace(recipe.optimizer, average_decay=0.5)
    return dataclasses.replace(recipe, adapter=AdapterConfig("lora", rank=2), optimizer=optimizer)


def frozen_file(run: Path) -> Path:
    return run / "checkpoints" / "frozen" / "model.safetensors"


def tensor_bytes(path: Path) -> int:
    """By the format: 8 bytes that say how long the header is, the header, the tensors."""
    content = path.read_bytes()
    return len(content) - 8 - struct.unpack("<Q", content[:8])[0]


@pytest.mark.thorough
def test_a_checkpoint_holds_what_is_trained_and_names_the_frozen_weights(tuned: Path) -> None:
    checkpoints = sorted((tuned / "checkpoints").glob("step-*"))
    assert [path.name for path in checkpoints] == ["step-00000001", "step-00000002"]
    assert sorted(path.name for path in frozen_file(tuned).parent.iterdir()) == ["SHA256SUMS", "model.safetensors"]
    for path in (*checkpoints, frozen_file(tuned).parent):
        # As `sha256sum -c` reads it.
        listed = dict(line.split("  ")[::-1] for line in (path / "SHA256SUMS").read_text().splitlines())
        assert {"../frozen/model.safetensors"} <= listed.keys() or path.name == "frozen"
        for name, checksum in listed.items():
            assert hashlib.sha256((path / name).read_bytes()).hexdigest() == checksum
    assert all(".adapter." in name for name in load_file(checkpoints[0] / "model.safetensors"))


def test_planned_bytes_are_those_on_the_disk(planned: Plan, tuned: Path) -> None:
    newest = tuned / "checkpoints" / "step-00000002"
    stored = sum(tensor_bytes(newest / f"{stem}.safetensors") for stem in ("model", "optimizer"))
    # By hand: weights, two moments, averages; A and B of seven matrices in each block.
    config = planned.recipe.model
    d, ff = config.d_model, config.resolved_d_ff
    kv = d * (config.n_kv_heads or config.n_heads) // config.n_heads
    widths = [(d, d), (d, kv), (d, kv), (d, d), (d, ff), (d, ff), (ff, d)]
    assert stored == config.n_layers * sum(16 * 2 * (a + b) for a, b in widths)
    assert whole_checkpoint_bytes(planned) == stored
    assert json.loads((tuned / "plan.json").read_text())["checkpoint_bytes"] == stored
    rows = {row["quantity"]: row for row in json.loads((tuned / "measurement.json").read_text())["table"]}
    for name, expected in (("frozen bytes", tensor_bytes(frozen_file(tuned))), ("checkpoint bytes", stored)):
        assert (rows[name]["count"], rows[name]["meter"]) == (expected, expected)
        assert 0.5 < rows[name]["rule"] / expected < 2
    assert "of frozen weights, once" in describe_checkpoints(planned)


@pytest.mark.thorough
def test_a_run_needs_nothing_of_the_folder_that_it_started_from(folder: Path, tuned: Path, tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", lora(folder, precision="bf16")
    create_run(recipe, run)
    (folder / "start").rename(folder / "gone")
    try:
        train_run(*open_run(run))
        for name in ("model", "optimizer"):
            resumed, whole = (each / "checkpoints/step-00000002" / f"{name}.safetensors" for each in (run, tuned))
            assert resumed.read_bytes() == whole.read_bytes()
        again = Transformer(open_base(run).config)
        open_base(run).load_into(again)
        assert_equal(again, load(run).model)
        # Tuning goes on from there, with adapters and frozen weights of its own.
        further = dataclasses.replace(recipe, tuning=dataclasses.replace(recipe.tuning, start=str(run)))
        create_run(further, tmp_path / "further")
        merged = {name: each.bfloat16() for name, each in again.named_parameters() if name.startswith("blocks.")}
        kept = load_file(frozen_file(tmp_path / "further"))
        assert all(torch.equal(kept[name], each) for name, each in merged.items() if each.ndim == 2)
    finally:
        (folder / "gone").rename(folder / "start")


def assert_equal(one: Transformer, other: Transformer) -> None:
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def other_weights(path: Path) -> None:
    """A file like it, whose own checksum is right."""
    tensors = load_file(path)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path)
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_name("SHA256SUMS").write_text(f"{checksum}  model.safetensors\n")


@pytest.mark.parametrize("damage", [cut, Path.unlink, other_weights])
def test_frozen_weights_that_are_others_are_named_and_nothing_is_set_aside(
    run: Path, damage: Callable[[Path], None]
) -> None:
    damage(frozen_file(run))
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    uses: list[Callable[[], object]] = [lambda: load(run).model, lambda: open_base(run).fingerprint]
    if damage is other_weights:
        uses.append(lambda: train_run(*open_run(run)))
    for use in uses:
        with pytest.raises(CorruptFile, match=r"^'.*/frozen/model.safetensors' .*restore.*need"):
            use()
    assert finished_checkpoint(run) is None
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == names


def test_a_checkpoint_of_another_run_is_no_damage_of_the_frozen_weights(run: Path) -> None:
    listed = run / "checkpoints" / "step-00000002" / "SHA256SUMS"
    assert len(list((run / "checkpoints").glob("step-*"))) > 1
    listed.write_text(re.sub(r"\w+(?=  \.\./frozen/)", 64 * "0", listed.read_text()))
    with pytest.raises(CorruptFile, match=r"SHA256SUMS'.*weights.*or"):
        read_checkpoint(listed.parent)


def test_a_run_without_a_checkpoint_verifies_its_frozen_weights(folder: Path, tmp_path: Path) -> None:
    create_run(lora(folder), tmp_path / "run")
    cut(frozen_file(tmp_path / "run"))
    with pytest.raises(CorruptFile, match=r"^'.*/frozen/model.safetensors'.*truncated"):
        train_run(*open_run(tmp_path / "run"))


def test_a_damaged_list_of_the_frozen_weights_harms_no_checkpoint(run: Path) -> None:
    """Checkpoints go on with the checksum that was verified."""
    (frozen_file(run).parent / "SHA256SUMS").write_text("nonsense")
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    train_run(*open_run(run))
    assert (
        read_checkpoint(run / "checkpoints" / "step-00000002").frozen
        == hashlib.sha256(frozen_file(run).read_bytes()).hexdigest()
    )


def test_a_checkpoint_of_the_whole_model_with_adapters_is_refused(run: Path) -> None:
    """As they were before frozen weights were kept apart."""
    step = run / "checkpoints" / "step-00000002"
    save_file(load_file(step / "model.safetensors") | load_file(frozen_file(run)), step / "model.safetensors")
    files = ("model.safetensors", "optimizer.safetensors", "state.json")
    sums = [f"{hashlib.sha256((step / name).read_bytes()).hexdigest()}  {name}\n" for name in files]
    (step / "SHA256SUMS").write_text("".join(sums))
    for use in (lambda: load(run).model, lambda: train_run(*open_run(run))):
        with pytest.raises(NapkinError, match=r"earlier napkin.*train"):
            use()


def test_weights_that_are_not_finite_leave_nothing_behind(folder: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    shutil.copytree(folder / "start", start)
    step = max((start / "checkpoints").glob("step-*"))
    tensors = load_file(step / "model.safetensors")
    tensors["embedding.weight"][0, 0] = torch.nan
    save_file(tensors, step / "model.safetensors")
    sums = (step / "SHA256SUMS").read_text().splitlines()
    sums[0] = f"{hashlib.sha256((step / 'model.safetensors').read_bytes()).hexdigest()}  model.safetensors"
    (step / "SHA256SUMS").write_text("".join(f"{line}\n" for line in sums))
    recipe = lora(folder)
    recipe = dataclasses.replace(recipe, tuning=dataclasses.replace(recipe.tuning, start=str(start)))
    with pytest.raises(NapkinError, match=r"'embedding\.weight'.*infinity.*NaN"):
        tune(recipe, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["start"]


def test_a_train_state_is_saved_and_loaded_whole(folder: Path, tmp_path: Path) -> None:
    recipe = dataclasses.replace(lora(folder), model=open_base(folder / "start").config)
    resolved = ResolvedRecipe(recipe, Precision("bf16", "cpu"))
    first, second = build_train_state(resolved), build_train_state(resolved.with_training(init_seed=9))
    for step in (0, 1):
        checkpoint = save_checkpoint(tmp_path, first, step=step, seconds=1.0, tokenizer="t", train_tokens="d")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frozen", "step-00000000", "step-00000001"]
    load_train_state(checkpoint, second)
    assert_equal(second.model, first.model)
