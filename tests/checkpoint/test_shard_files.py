"""Checkpoints that ranks wrote by rows: read whole, or refused with the name of the file."""

import dataclasses
import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from napkin.checkpoint.folder import read_checkpoint
from napkin.checkpoint.restore import load_train_state
from napkin.checkpoint.state import tensors_of
from napkin.checkpoint.writer import save_checkpoint
from napkin.distributed.ranks import ALONE
from napkin.errors import CorruptFile
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step import TrainState, build_train_state
from oracles.tiny_run import tiny_recipe

SIZE = 3


def recipe() -> Recipe:
    made = tiny_recipe(".")
    return dataclasses.replace(made, model=dataclasses.replace(made.model, vocab_size=17))


def learner_after(steps: int) -> TrainState:
    train_state = build_train_state(ResolvedRecipe(recipe(), Precision("fp32", "cpu")), ALONE)
    draw = torch.Generator().manual_seed(0)
    for number in range(steps):
        inputs, targets = torch.randint(17, (2, 4, 32), generator=draw)
        train_state.step(number, inputs, targets)
    return train_state


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one process."""
    folder = tmp_path_factory.mktemp("whole")
    return save_checkpoint(folder, learner_after(2), step=2, seconds=1.0, tokenizer="a", train_tokens="b").path


@pytest.fixture
def sharded(tmp_path: Path, whole: Path) -> Path:
    """The same as three ranks would write it: ceil(rows / 3) rows each, the last ones what is left."""
    folder = tmp_path / whole.name
    shutil.copytree(whole, folder)
    for stem in ("model", "optimizer"):
        file = folder / f"{stem}.safetensors"
        tensors = load_file(file)
        file.unlink()
        for rank in range(SIZE):
            write_shard(folder / f"{stem}-{rank + 1:05d}-of-{SIZE:05d}.safetensors", tensors, rank)
    sign(folder)
    return folder


def write_shard(path: Path, tensors: dict[str, Tensor], rank: int, *, shift: int = 0) -> None:
    rows, info = {}, {}
    for name, tensor in tensors.items():
        each = -(-len(tensor) // SIZE)
        part = tensor[rank * each : (rank + 1) * each].contiguous()
        if len(part):
            rows[name] = part
            info[name] = {"saved_offsets": [rank * each + shift, *[0] * (tensor.ndim - 1)]}
    save_file(rows, path, metadata={"DCP_SHARDING_INFO": json.dumps(info)})


def sign(folder: Path) -> None:
    names = [path.name for path in sorted(folder.iterdir()) if path.name != "SHA256SUMS"]
    lines = [f"{sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(lines))


def test_one_process_reads_what_three_have_written(sharded: Path) -> None:
    wanted, train_state = learner_after(2), learner_after(0)
    load_train_state(read_checkpoint(sharded), train_state)
    for stem, tensors in tensors_of(wanted).items():
        for name, tensor in tensors_of(train_state)[stem].items():
            assert torch.equal(tensor, tensors[name]), name


def test_a_bit_flipped_in_any_file_is_noticed(sharded: Path) -> None:
    for file in sorted(sharded.iterdir()):
        good = file.read_bytes()
        file.write_bytes(good[:-2] + bytes([good[-2] ^ 1]) + good[-1:])
        with pytest.raises(CorruptFile, match=file.name if file.suffix != "" else "SHA256SUMS"):
            read_checkpoint(sharded)
        file.write_bytes(good)
    read_checkpoint(sharded)


def test_a_missing_shard_is_noticed_though_nobody_lists_it(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CorruptFile, match=r"model-00002-of-00003\.safetensors'"):
        read_checkpoint(sharded)
    sign(sharded)
    with pytest.raises(CorruptFile, match="list model-00001-of-00003"):
        read_checkpoint(sharded)


def test_rows_that_do_not_follow_one_another_are_refused_though_the_checksums_are_right(sharded: Path) -> None:
    tensors = {name: tensor.detach() for name, tensor in learner_after(2).model.named_parameters()}
    write_shard(sharded / "model-00002-of-00003.safetensors", tensors, 1, shift=1)
    sign(sharded)
    with pytest.raises(CorruptFile, match=r"parts.*overlap"):
        load_train_state(read_checkpoint(sharded), learner_after(0))


NORM = "norm.gain"
HOSTILE = [
    "[",
    "[]",
    "{}",
    '{"x": 1}',
    f'{{"{NORM}": {{"saved_offsets": ["x"]}}}}',
    "[" * 100_000,
]


@pytest.mark.parametrize("info", HOSTILE, ids=range(len(HOSTILE)))
def test_a_header_that_makes_no_sense_is_refused_though_the_checksums_are_right(sharded: Path, info: str) -> None:
    file = sharded / "model-00002-of-00003.safetensors"
    save_file(load_file(file), file, metadata={"DCP_SHARDING_INFO": info})
    sign(sharded)
    with pytest.raises(CorruptFile, match=f"{file.name}'.*offsets") as raised:
        load_train_state(read_checkpoint(sharded), learner_after(0))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("offsets", [[-16], [16.0], [True], ["16"], [16, 0], [], 16, None, {}, [2**63], [2**2000]])
def test_offsets_that_are_none_are_refused_though_the_checksums_are_right(sharded: Path, offsets: object) -> None:
    file = sharded / "model-00002-of-00003.safetensors"
    with safe_open(file, framework="pt") as opened:
        info = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
    assert info[NORM] == {"saved_offsets": [16]}
    save_file(
        load_file(file), file, metadata={"DCP_SHARDING_INFO": json.dumps(info | {NORM: {"saved_offsets": offsets}})}
    )
    sign(sharded)
    with pytest.raises(CorruptFile, match=f"{file.name}'.*offsets") as raised:
        load_train_state(read_checkpoint(sharded), learner_after(0))
    assert len(str(raised.value)) < 500


def test_offsets_far_beyond_the_tensor_are_refused_though_the_checksums_are_right(sharded: Path) -> None:
    tensors = {name: tensor.detach() for name, tensor in learner_after(2).model.named_parameters()}
    write_shard(sharded / "model-00003-of-00003.safetensors", tensors, 2, shift=2**60)
    sign(sharded)
    with pytest.raises(CorruptFile, match=r"parts.*overlap"):
        load_train_state(read_checkpoint(sharded), learner_after(0))


def test_a_file_that_nobody_lists_is_not_read(sharded: Path) -> None:
    shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded / "model-00001-of-00004.safetensors")
    load_train_state(read_checkpoint(sharded), learner_after(0))
