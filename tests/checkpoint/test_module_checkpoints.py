"""Checkpoints of any module and optimizer, beside torch.save's and a run that was not interrupted."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import napkin
from napkin.checkpoint import load, save
from napkin.errors import CorruptFile, NapkinError

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch's AdamW": lambda module: torch.optim.AdamW(module.parameters(), lr=0.1, amsgrad=True),
    "torch's SGD": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    "torch's Adafactor": lambda module: torch.optim.Adafactor(module.parameters(), lr=0.1),
    "torch's NAdam": lambda module: torch.optim.NAdam(module.parameters(), lr=0.1),
    "AdamW": lambda module: napkin.optim.AdamW(module.parameters(), lr=0.1),
    "Adafactor": lambda module: napkin.optim.Adafactor(module.parameters(), lr=0.1),
}


class Module(nn.Module):
    """Tied matrices, buffers, formats of 8 to 64 bits, a part of a larger tensor, infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("column", torch.arange(12).view(3, 4)[:, 1])
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("narrow", torch.randn(3, dtype=torch.bfloat16))
        self.register_buffer("none", torch.zeros(0, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens)))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(5, (6,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(tokens), tokens).backward()
        optimizer.step()


def same(one: object, other: object) -> bool:
    """True where two state dicts have the same types, names and bits."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_from_a_checkpoint_equals_training_that_went_on(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    module = Module()
    optimizer = OPTIMIZERS[name](module)
    train(module, optimizer, range(3))
    made = save(module, optimizer, tmp_path / "runs" / "one", step=3, values={"seed": 7, "rate": 0.1})
    torch.save((module.state_dict(), optimizer.state_dict()), tmp_path / "theirs.pt")
    train(module, optimizer, range(3, 6))

    torch.manual_seed(1)
    again = Module()
    other = OPTIMIZERS[name](again)
    loaded = load(made, again, other)
    assert (loaded.step, loaded.values) == (3, {"seed": 7, "rate": 0.1})
    # The witness: what torch's own pickle of the same moment holds.
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    assert same(dict(again.state_dict()), dict(theirs[0]))
    assert same(other.state_dict(), theirs[1])
    train(again, other, range(3, 6))
    assert same(dict(again.state_dict()), dict(module.state_dict()))
    assert same(other.state_dict(), optimizer.state_dict())


def test_shared_tensors_are_stored_once_and_a_part_of_a_tensor_alone(tmp_path: Path) -> None:
    module = Module()
    save(module, None, tmp_path / "one")
    numbers = sum(tensor.nbytes for tensor in module.state_dict().values())
    stored = (tmp_path / "one" / "model.safetensors").stat().st_size
    assert numbers - module.embedding.weight.nbytes < stored
    saved = json.loads((tmp_path / "one" / "state.json").read_text())
    names = dict(saved["model"]["dict"])
    assert names["head.weight"] == names["embedding.weight"]
    assert (
        subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=tmp_path / "one", check=False).returncode == 0
    )


def test_nothing_is_overwritten_and_nothing_is_changed_by_what_does_not_fit(tmp_path: Path) -> None:
    module = Module()
    optimizer = OPTIMIZERS["torch's AdamW"](module)
    train(module, optimizer, range(1))
    path = save(module, optimizer, tmp_path / "one")
    before = {each.name: each.read_bytes() for each in path.iterdir()}
    with pytest.raises(NapkinError, match="exists and is not overwritten"):
        save(module, optimizer, path)
    assert {each.name: each.read_bytes() for each in path.iterdir()} == before
    assert os.listdir(tmp_path) == ["one"]

    smaller = nn.Sequential(nn.Linear(2, 2))
    values = [p.detach().clone() for p in smaller.parameters()]
    with pytest.raises(NapkinError, match="of another module"):
        load(path, smaller)
    assert all(torch.equal(*pair) for pair in zip(smaller.parameters(), values, strict=True))
    narrow = Module().bfloat16()
    with pytest.raises(NapkinError, match=r"'mask' is float32 \(3, 3\) there, and bfloat16 \(3, 3\) here"):
        load(path, narrow)

    other = Module()
    kept = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    fewer = torch.optim.AdamW([other.embedding.weight])
    with pytest.raises(NapkinError, match=r"groups have \[3\] parameters, those of this one \[1\]"):
        load(path, other, fewer)
    reordered = torch.optim.AdamW(reversed(list(other.parameters())))
    with pytest.raises(NapkinError, match="parameter"):
        load(path, other, reordered)
    assert same(dict(other.state_dict()), kept)
    alone = save(module, None, tmp_path / "two")
    with pytest.raises(NapkinError, match="holds no optimizer"):
        load(alone, other, OPTIMIZERS["torch's AdamW"](other))
    optimizer.param_groups[0]["device"] = torch.device("cpu")
    with pytest.raises(NapkinError, match=r"optimizer.param_groups.0.device is a device"):
        save(module, optimizer, tmp_path / "three")
    with pytest.raises(NapkinError, match="cannot be written"):
        save(module, None, tmp_path / "three", values={"x": object()})
    assert sorted(os.listdir(tmp_path)) == ["one", "two"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS"])
def test_every_damaged_byte_is_noticed(tmp_path: Path, name: str) -> None:
    module = Module()
    optimizer = OPTIMIZERS["torch's SGD"](module)
    train(module, optimizer, range(1))
    path = save(module, optimizer, tmp_path / "one")
    whole = (path / name).read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        (path / name).write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(CorruptFile, match=str(path)):
            load(path, Module(), None)
    (path / name).unlink()
    with pytest.raises(CorruptFile, match=name):
        load(path, Module())


STRANGE = [
    '{"dict": 1}',
    '{"tensor": "absent"}',
    '{"tensor": [1]}',
    '{"other": 1}',
    "{}",
    '{"dict": [["a", 1], ["b"]]}',
    '{"dict": [[[1], 1]]}',
    '{"float": "many"}',
    "null",
    "[" * 5000 + "]" * 5000,
    '{"dict": [["state", 1], ["param_groups", {"tuple": [1]}]]}',
    '{"dict": [["state", {"dict": [[0, 1]]}], ["param_groups", []]]}',
]


@pytest.mark.parametrize("field", ["model", "optimizer"])
@pytest.mark.parametrize("strange", STRANGE)
def test_a_strangers_description_is_refused_in_one_line(tmp_path: Path, field: str, strange: str) -> None:
    module = Module()
    optimizer = OPTIMIZERS["torch's SGD"](module)
    train(module, optimizer, range(1))
    path = save(module, optimizer, tmp_path / "one")
    state = json.loads((path / "state.json").read_text())
    state[field] = "HERE"
    (path / "state.json").write_text(json.dumps(state).replace('"HERE"', strange))
    files = ("model.safetensors", "optimizer.safetensors", "state.json")
    sums = subprocess.run(["sha256sum", *files], cwd=path, capture_output=True, check=True)
    (path / "SHA256SUMS").write_bytes(sums.stdout)
    with pytest.raises(NapkinError) as refused:
        load(path, module, optimizer)
    assert "\n" not in str(refused.value)


def test_a_writer_that_is_killed_leaves_no_checkpoint(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        setattr(Path, "rename", lambda *_: os._exit(9))  # noqa: B010
        save(nn.Linear(2, 2), None, tmp_path / "one")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (tmp_path / "one").exists()
    save(nn.Linear(2, 2), None, tmp_path / "one")
    assert os.listdir(tmp_path) == ["one"]
