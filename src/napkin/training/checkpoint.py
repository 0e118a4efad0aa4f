"""Checkpoints: the state of a run after a step, on disk, whole or not at all.

`step-00000200/` holds model.safetensors, optimizer.safetensors and state.json, which names the two with their
sizes and SHA-256. The folder is written under a hidden name, every file synced, and then renamed. Nothing in it is
a program: tensors are safetensors, the rest is JSON.
"""

import os
import platform
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import napkin
from napkin.errors import CorruptFile, NapkinError
from napkin.files import atomic_write_bytes, sync_file, sync_folder
from napkin.training.step import Learner


class _FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """state.json: what a checkpoint says of itself."""

    format: Literal["napkin-checkpoint"]
    version: Literal[1]
    step: int
    """Updates done."""
    seconds: float
    """Of training so far."""
    optimizer_steps: list[int]
    """`step` of each parameter group."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    libraries: dict[str, str]
    files: dict[str, _FileRecord]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    state: State


def save_checkpoint(folder: Path, learner: Learner, *, step: int, seconds: float, tokenizer: str) -> Checkpoint:
    """Write `folder`/step-XXXXXXXX and return it; one that is there already is kept as it is.

    Raises NapkinError where the disk is full or cannot be written; earlier checkpoints stay untouched.
    """
    path = folder / f"step-{step:08d}"
    if path.exists():
        return read_checkpoint(path)
    draft = folder / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        draft.mkdir()
        save_file(_model_tensors(learner), draft / "model.safetensors")
        save_file(_optimizer_tensors(learner), draft / "optimizer.safetensors")
        state = State(
            format="napkin-checkpoint",
            version=1,
            step=step,
            seconds=seconds,
            optimizer_steps=[group["step"] for group in learner.optimizer.param_groups],
            tokenizer=tokenizer,
            libraries={
                "napkin": napkin.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            files={file.name: _file_record(file) for file in sorted(draft.glob("*.safetensors"))},
        )
        for file in draft.glob("*.safetensors"):
            sync_file(file)
        atomic_write_bytes(draft / "state.json", msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
        draft.rename(path)
        sync_folder(folder)
    except (OSError, SafetensorError) as error:
        raise NapkinError(
            f"'{path}' cannot be written ({error}): make room and continue with `napkin resume {folder.parent}`"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Checkpoint(path, state)


def prune_checkpoints(folder: Path, *, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints, and what killed writers left behind."""
    for path in _newest_first(folder)[keep:]:
        # Renamed first: a kill half-way through leaves no checkpoint with files missing.
        doomed = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        path.rename(doomed)
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def checkpoints_newest_first(folder: Path) -> Iterator[Checkpoint | CorruptFile]:
    """Every checkpoint, verified bit by bit; in place of one that is damaged, the error that says how."""
    for path in _newest_first(folder):
        try:
            yield read_checkpoint(path, verify=True)
        except CorruptFile as error:
            yield error


def read_checkpoint(path: Path, *, verify: bool = False) -> Checkpoint:
    """A checkpoint's state; with `verify`, sizes and checksums of its files are compared.

    Raises CorruptFile naming the file and what is wrong with it.
    """
    state_path = path / "state.json"
    try:
        state = msgspec.json.decode(state_path.read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptFile(f"'{state_path}' does not describe a checkpoint ({error}): remove '{path}'") from None
    if path.name != f"step-{state.step:08d}" or set(state.files) != {"model.safetensors", "optimizer.safetensors"}:
        raise CorruptFile(f"'{state_path}' describes another checkpoint, of step {state.step}: remove '{path}'")
    for name, expected in state.files.items() if verify else ():
        try:
            found = _file_record(path / name)
        except OSError as error:
            raise CorruptFile(f"'{path / name}' cannot be read ({error.strerror}): remove '{path}'") from None
        if found.bytes != expected.bytes:
            raise CorruptFile(
                f"'{path / name}' is {found.bytes} bytes long, its checkpoint says {expected.bytes}: remove '{path}'"
            )
        if found.sha256 != expected.sha256:
            raise CorruptFile(f"'{path / name}' was altered, its SHA-256 is not the checkpoint's: remove '{path}'")
    return Checkpoint(path, state)


def load_model(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    """Copy a checkpoint's weights into `model`."""
    _copy_into(dict(model.named_parameters()), checkpoint.path / "model.safetensors")


def load_learner(checkpoint: Checkpoint, learner: Learner) -> None:
    """Copy a checkpoint's weights and optimizer state into `learner`, which then goes on as if never stopped."""
    load_model(checkpoint, learner.model)
    for _, parameter in learner.model.named_parameters():
        # Made by torch itself: tensors of a mapped file are aligned otherwise, and vector code then sums otherwise.
        learner.optimizer.state[parameter] = {
            name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")
        }
    _copy_into(_optimizer_tensors(learner), checkpoint.path / "optimizer.safetensors")
    steps = checkpoint.state.optimizer_steps
    for group, step in zip(learner.optimizer.param_groups, steps, strict=True):
        group["step"] = step


def _copy_into(targets: dict[str, Tensor], path: Path) -> None:
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CorruptFile(f"'{path}' cannot be read as safetensors ({error}): remove '{path.parent}'") from None
    for name in sorted(targets.keys() | stored.keys()):
        target, found = targets.get(name), stored.get(name)
        if target is None or found is None or target.shape != found.shape:
            raise NapkinError(
                f"'{path}' does not fit the recipe's model: tensor '{name}' is "
                f"{tuple(found.shape) if found is not None else 'missing'} there and "
                f"{tuple(target.shape) if target is not None else 'unknown'} in the model: use the run's own recipe"
            )
        with torch.no_grad():
            target.copy_(found)


def _model_tensors(learner: Learner) -> dict[str, Tensor]:
    return {name: parameter.detach().contiguous() for name, parameter in learner.model.named_parameters()}


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    return {
        f"{moment}.{name}": tensor
        for name, parameter in learner.model.named_parameters()
        for moment, tensor in learner.optimizer.state[parameter].items()
    }


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)


def _file_record(path: Path) -> _FileRecord:
    checksum = sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            checksum.update(chunk)
    return _FileRecord(os.path.getsize(path), checksum.hexdigest())
