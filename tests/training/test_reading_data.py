"""What a run reads of its tokens: verified before anything is learned from it, shifted by epoch, and counted."""

import dataclasses
import json
import os
import random
import signal
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

import napkin
from napkin.checkpoint.folder import checkpoint_paths, read_checkpoint
from napkin.data import SEPARATOR, Document, TokenFile, write_token_file
from napkin.data.token_file import BLOCK_BYTES, sidecar_path
from napkin.errors import CorruptFile, NapkinError
from napkin.planning.planner import plan
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe
from napkin.runs.metrics import read_metrics
from napkin.runs.run_folder import RunFolder
from napkin.tokenizer.bpe import ByteTokenizer
from napkin.training.pretraining import Pretraining
from napkin.training.run import create_run, open_run, train_run
from oracles.altered_tokens import flip_bit, hashed_blocks
from oracles.tiny_run import tiny_recipe, with_recipe, write_tiny_text

TOKENIZER = ByteTokenizer([SEPARATOR])
BLOCK_TOKENS = BLOCK_BYTES // 2


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    write_tiny_text(folder)
    return folder


def with_data(recipe: Recipe, **data: Any) -> Recipe:
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **data))


def four_blocks(text: Path) -> Recipe:
    """A recipe over a training file of four blocks."""
    document = Document("x", random.Random(0).randbytes(2 * BLOCK_TOKENS - 2).hex())
    write_token_file(text / "blocks.tokens", [document], TOKENIZER)
    recipe = tiny_recipe(text, steps=8, batch_size=1, checkpoint_every=2, keep_checkpoints=20)
    return with_data(recipe, train=f"{text}/blocks.tokens")


def losses(run: RunFolder) -> list[tuple[int, float, float, float | None]]:
    found = read_metrics(run.path / "metrics.jsonl")
    return [(line.step, line.loss, line.gradient_norm, line.validation_loss) for line in found]


def starts_of(recipe: Recipe) -> list[int]:
    """The block that the first token of each step's only window is in."""
    preparation, _ = create_run(recipe, f"{recipe.data.train}-probe")
    assert isinstance(preparation, Pretraining)
    tokens = preparation.train_tokens.files[0].tokens.tobytes()
    windows = [preparation.batches[step][0].numpy() for step in range(recipe.training.steps)]
    return [tokens.find(window.astype("<u2").tobytes()) // BLOCK_BYTES for window in windows]


@pytest.mark.thorough
@pytest.mark.parametrize("prefetch", [pytest.param("off", marks=pytest.mark.torture), "on"])
def test_a_flipped_bit_ends_the_run_before_anything_is_learned_from_its_block(text: Path, prefetch: str) -> None:
    recipe = with_data(four_blocks(text), prefetch=prefetch)
    blocks = starts_of(recipe)
    first = {block: blocks.index(block) for block in set(blocks) - {0}}
    bad, step = max(first.items(), key=lambda item: item[1])
    assert step > 2
    _, whole = create_run(recipe, text / "whole")
    train_run(*open_run(whole.path))
    flip_bit(text / "blocks.tokens", bad * BLOCK_BYTES + 1000)

    # The start reads the first block alone.
    with hashed_blocks() as hashed:
        preparation, run = create_run(recipe, text / "run")
    assert max(hashed) == BLOCK_BYTES
    assert hashed.count(BLOCK_BYTES) == 1
    with pytest.raises(CorruptFile) as caught:
        train_run(preparation, run)
    line = str(caught.value)
    assert f"blocks.tokens' was altered: block {bad} (from byte {bad * BLOCK_BYTES:,}) does not have" in line
    assert line.endswith(f"; nothing was learned from it, step {step} is saved")
    assert "\n" not in line
    assert losses(run) == losses(whole)[:step]
    assert read_checkpoint(checkpoint_paths(run.checkpoints)[0]).state.step == step
    # It is told again until the file is put back, and then the run is what it would have been.
    with pytest.raises(CorruptFile, match=f"block {bad} "):
        train_run(*open_run(run.path))
    flip_bit(text / "blocks.tokens", bad * BLOCK_BYTES + 1000)
    train_run(*open_run(run.path))
    assert losses(run) == losses(whole)


@pytest.mark.torture
def test_a_flipped_bit_in_the_validation_tokens_is_told(text: Path) -> None:
    recipe = tiny_recipe(text, steps=8, evaluate_every=4, batch_size=128)
    document = Document("x", random.Random(1).randbytes(BLOCK_TOKENS).hex())
    write_token_file(text / "more.tokens", [document], TOKENIZER)
    recipe = with_data(recipe, validation=f"{text}/more.tokens")
    recipe = dataclasses.replace(
        recipe,
        training=dataclasses.replace(recipe.training, evaluation_tokens=BLOCK_TOKENS + 1000),
    )
    flip_bit(text / "more.tokens", BLOCK_BYTES + 100)
    preparation, run = create_run(recipe, text / "run")
    with pytest.raises(CorruptFile, match=r"more\.tokens'.*altered: block 1"):
        train_run(preparation, run)
    assert not any(line.validation_loss for line in read_metrics(run.path / "metrics.jsonl"))


@pytest.mark.parametrize("side", ["train", "validation"])
def test_a_small_file_that_was_altered_is_refused_before_anything_is_made(text: Path, side: str) -> None:
    flip_bit(text / f"{side}.tokens", 100)
    with pytest.raises(CorruptFile, match=rf"{side}\.tokens'.*altered: block 0 \(from.*0\)"):
        create_run(tiny_recipe(text), text / "run")
    assert not (text / "run").exists()


@pytest.mark.thorough
def test_without_verification_a_flipped_bit_is_not_looked_for(text: Path) -> None:
    recipe = with_data(tiny_recipe(text, steps=2), verify=False)
    flip_bit(text / "train.tokens", 100)
    assert train_run(*create_run(recipe, text / "run")).step == 2


@pytest.mark.thorough
def test_a_run_on_a_terabyte_reads_the_blocks_of_its_batches_alone(text: Path) -> None:
    path, size = text / "zeros.tokens", 10**12
    path.touch()
    try:
        os.truncate(path, size)
    except OSError:
        pytest.skip("the file system has no files of a terabyte")
    n_whole, rest = divmod(size, BLOCK_BYTES)
    whole, last = (sha256(bytes(n)).hexdigest()[:16] for n in (BLOCK_BYTES, rest))
    content = json.loads((text / "train.tokens.json").read_text())
    content |= {"tokens": size // 2, "blocks": n_whole * whole + last}
    sidecar_path(path).write_text(json.dumps(content))
    recipe = with_data(tiny_recipe(text, steps=4, batch_size=4), train=str(path))
    # The blocks of the validation text are small.
    with hashed_blocks() as hashed:
        preparation, run = create_run(recipe, text / "run")
        assert hashed.count(BLOCK_BYTES) == 1
        assert train_run(preparation, run).step == 4
        assert 1 < hashed.count(BLOCK_BYTES) <= 1 + 4 * 4 * 2
    with hashed_blocks() as hashed:
        open_run(run.path)
    assert hashed.count(BLOCK_BYTES) == 1


def test_files_of_an_earlier_version_are_verified_before_training(text: Path) -> None:
    for name in ("train", "validation"):
        described = text / f"{name}.tokens.json"
        content = json.loads(described.read_text())
        del content["blocks"], content["block_bytes"]
        described.write_text(json.dumps(content | {"version": 1}))
    recipe = tiny_recipe(text, steps=3)
    assert train_run(*create_run(recipe, text / "run")).step == 3
    flip_bit(text / "train.tokens", 100)
    with pytest.raises(CorruptFile, match=r"train\.tokens'.*altered.*SHA-256"):
        create_run(recipe, text / "other")
    assert not (text / "other").exists()


@pytest.mark.parametrize("fields", [{"vocab_size": 60_000}, {"separator": 3}])
def test_a_sidecar_with_another_vocabulary_than_its_tokenizer_is_refused(text: Path, fields: dict[str, int]) -> None:
    described = text / "train.tokens.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | fields))
    with pytest.raises(NapkinError, match=r"'.*train\.tokens'.*vocabulary"):
        create_run(tiny_recipe(text), text / "run")


def little_text(text: Path, **training: Any) -> Recipe:
    """A recipe that reads a file of 15 windows several times."""
    path = text / "little.tokens"
    if not path.exists():
        write_token_file(path, [Document("x", random.Random(0).randbytes(249).hex())], TOKENIZER)
    settings = {"steps": 16, "batch_size": 4, "evaluate_every": 5, "checkpoint_every": 6} | training
    return with_data(tiny_recipe(text, **settings), train=str(path))


def stop_after(step: int) -> Callable[[Any], None]:
    return lambda metrics: signal.raise_signal(signal.SIGTERM) if metrics.step == step else None


@pytest.mark.torture
def test_a_run_of_several_epochs_resumes_as_if_never_stopped(text: Path) -> None:
    recipe = little_text(text)
    preparation, whole = create_run(recipe, text / "whole")
    assert preparation.recipe.data.windows == "shifted"
    train_run(preparation, whole)
    for stop in (1, 5, 9):
        run = RunFolder.create(text / f"run-{stop}", preparation.recipe, preparation.tokenizer)
        stopped = train_run(preparation, run, on_step=stop_after(stop))
        assert stopped.step == stop
        train_run(*open_run(run.path))
        assert losses(run) == losses(whole)


@pytest.mark.torture
def test_a_run_of_before_windows_were_shifted_continues_as_it_began(text: Path) -> None:
    recipe = with_data(little_text(text), windows="fixed")
    preparation, whole = create_run(recipe, text / "whole")
    train_run(preparation, whole)
    preparation, run = create_run(recipe, text / "run")
    train_run(preparation, run, on_step=lambda m: signal.raise_signal(signal.SIGTERM) if m.step == 5 else None)
    # Neither its recipe nor its checkpoint has the field.
    lines = (run.path / "recipe.toml").read_text().splitlines()
    assert 'windows = "fixed"' in lines
    kept = [line for line in lines if not line.startswith(("windows", "kernels"))]
    (run.path / "recipe.toml").write_text("\n".join(kept))
    [path] = checkpoint_paths(run.checkpoints)
    state = msgspec.json.decode((path / "state.json").read_bytes())
    del state["recipe"]["data"]["windows"]
    (path / "state.json").write_bytes(msgspec.json.encode(state))
    sums = [line for line in (path / "SHA256SUMS").read_text().splitlines() if "state.json" not in line]
    sums.append(f"{sha256((path / 'state.json').read_bytes()).hexdigest()}  state.json")
    (path / "SHA256SUMS").write_text("\n".join(sums) + "\n")

    preparation, run = open_run(run.path)
    assert preparation.recipe.data.windows == "fixed"
    assert preparation.recipe.training.kernels == "plain"
    train_run(preparation, run)
    assert losses(run) == losses(whole)
    _, shifted = create_run(little_text(text), text / "shifted")
    train_run(*open_run(shifted.path))
    assert losses(shifted) != losses(whole)


@pytest.mark.thorough
def test_windows_cannot_change_within_a_run(text: Path) -> None:
    preparation, run = create_run(little_text(text), text / "run")
    assert isinstance(preparation, Pretraining)
    train_run(preparation, run, on_step=lambda m: signal.raise_signal(signal.SIGTERM) if m.step == 5 else None)
    other = with_recipe(preparation, with_data(preparation.recipe, windows="fixed"))
    with pytest.raises(NapkinError, match=r'data.windows is "fixed", but .* was trained with "shifted"'):
        train_run(other, run)


def test_text_that_is_read_too_often_is_told_in_the_plan_and_at_the_start(text: Path) -> None:
    recipe = little_text(text, steps=200, batch_size=32)
    planned = plan(recipe)
    tokens = TokenFile.open(text / "little.tokens").n_tokens
    assert planned.epochs == pytest.approx(200 * 32 * 32 / tokens)
    in_a_batch, too_often = planned.warnings
    assert "a batch takes 32 windows of" in in_a_batch
    assert "which has only 15" in in_a_batch
    assert "little.tokens' 427 times" in too_often
    preparation, run = create_run(recipe, text / "run")
    assert preparation.plan is not None
    assert preparation.plan.warnings == planned.warnings
    assert json.loads((run.path / "plan.json").read_text())["epochs"] == pytest.approx(planned.epochs)
    told: list[str] = []
    stop = signal.SIGTERM
    train_run(preparation, run, on_message=told.append, on_step=lambda metrics: signal.raise_signal(stop))
    assert told[:2] == list(planned.warnings)


def test_enough_text_is_not_remarked_on(text: Path) -> None:
    assert plan(tiny_recipe(text)).warnings == ()
    missing = with_data(tiny_recipe(text), train=f"{text}/none.tokens")
    assert plan(missing).epochs is None


@pytest.mark.thorough
def test_each_logged_step_has_its_epochs(text: Path) -> None:
    recipe = little_text(text)
    (text / "recipe.toml").write_text(format_recipe(recipe))
    outcome = napkin.train(text / "recipe.toml", text / "run")
    tokens = TokenFile.open(text / "little.tokens").n_tokens
    assert outcome.step == 16
    for line in read_metrics(text / "run" / "metrics.jsonl"):
        assert line.epochs == pytest.approx(line.tokens / tokens)
