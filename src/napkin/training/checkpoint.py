"""Checkpoints: the state of a run after a step, on disk, whole or not at all.

`step-00000200/` holds model.safetensors, optimizer.safetensors, state.json, and SHA256SUMS over the three, in the
form that `sha256sum -c` reads. The folder is written under a hidden name, every file synced, and then renamed.
Nothing in it is a program: tensors are safetensors, the rest is text.
"""

import dataclasses
import math
import platform
import re
import secrets
import shutil
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import napkin
from napkin.errors import CorruptFile, NapkinError
from napkin.files import atomic_write_bytes, atomic_write_text, sync_file, sync_folder
from napkin.model.transformer import Transformer
from napkin.optim.loss_scale import LossScale
from napkin.training.step import Learner

_TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")
_FILES = (*_TENSOR_FILES, "state.json")
_SUMS = "SHA256SUMS"
_NAME = re.compile(r"step-(\d{8,})")


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """state.json: what a checkpoint says of itself."""

    format: Literal["napkin-checkpoint"]
    version: Literal[1]
    step: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    """Updates done."""
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    """Of training so far."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    train_tokens: str
    """SHA-256 of the tokens it has learned from."""
    recipe: dict[str, dict[str, Any]]
    """What was chosen, every field."""
    libraries: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    state: State


def save_checkpoint(
    folder: Path, learner: Learner, *, step: int, seconds: float, tokenizer: str, train_tokens: str
) -> Checkpoint:
    """Write `folder`/step-XXXXXXXX and return it; one that is there already and whole is kept as it is.

    The tensors go to the file from where they are: nothing is copied, but from a GPU. Raises NapkinError where the disk
    is full or cannot be written, and where a tensor holds infinity or NaN; earlier checkpoints stay untouched.
    """
    path = folder / f"step-{step:08d}"
    if path.exists():
        try:
            return read_checkpoint(path)
        except CorruptFile:
            set_aside(path)
    tensors = {"model.safetensors": _model_tensors(learner.model), "optimizer.safetensors": _optimizer_tensors(learner)}
    tensors["optimizer.safetensors"] |= learner.extra_state()
    _refuse_non_finite(tensors, step, folder)
    state = State(
        format="napkin-checkpoint",
        version=1,
        step=step,
        seconds=seconds,
        tokenizer=tokenizer,
        train_tokens=train_tokens,
        recipe=dataclasses.asdict(learner.recipe),
        libraries={"napkin": napkin.__version__, "torch": str(torch.__version__), "python": platform.python_version()},
    )
    draft = folder / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        draft.mkdir()
        for name, named in tensors.items():
            save_file(named, draft / name)
            # The library makes files for their owner alone; a run's other files are made as the user's umask says.
            (draft / name).chmod(draft.stat().st_mode & 0o666)
            sync_file(draft / name)
        atomic_write_bytes(draft / "state.json", msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
        atomic_write_text(draft / _SUMS, _format_sums({name: _checksum(draft / name) for name in _FILES}))
        draft.rename(path)
        sync_folder(folder)
    except (OSError, SafetensorError, NapkinError) as error:
        raise NapkinError(
            f"'{path}' cannot be written ({error}): make room and continue with `napkin resume {folder.parent}`, "
            "earlier checkpoints are kept"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Checkpoint(path, state)


def prune_checkpoints(folder: Path, *, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints, and what killed writers left behind."""
    for path in checkpoint_paths(folder)[keep:]:
        # Renamed first: a kill half-way through leaves no checkpoint with files missing.
        path.rename(path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp"))
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint out of the way, so that it neither counts as one nor is removed; its new path."""
    names = (path.with_name(f"damaged-{path.name}{suffix}") for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    sync_folder(path.parent)
    return aside


def checkpoint_paths(folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint, newest first; what else somebody keeps beside them is left alone."""
    numbered = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint whose files are, to the bit, as they were written.

    Raises CorruptFile naming the file and what is wrong with it.
    """
    expected = _read_sums(path / _SUMS)
    for name in _FILES:
        try:
            found = _checksum(path / name)
        except OSError as error:
            raise _damaged(path / name, f"cannot be read ({error.strerror})") from None
        if found != expected[name]:
            raise _damaged(path / name, f"was shortened or altered, its SHA-256 is not the one in {_SUMS}")
    try:
        state = msgspec.json.decode((path / "state.json").read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _damaged(path / "state.json", f"does not describe a checkpoint of this version ({error})") from None
    if path.name != f"step-{state.step:08d}":
        raise _damaged(path / "state.json", f"describes another checkpoint, of step {state.step}")
    return Checkpoint(path, state)


def load_model(checkpoint: Checkpoint, model: Transformer) -> None:
    """Copy a checkpoint's weights into `model`.

    Raises NapkinError where `model` is of another config than the one that was trained, also where the weights would
    fit; CorruptFile where they do not. `model` is untouched then.
    """
    changes = recipe_changes(checkpoint, {"model": dataclasses.asdict(model.config)})
    if changes:
        raise NapkinError(
            f"the recipe is not the one that '{checkpoint.path}' was trained with: {', '.join(changes)}: "
            "put that back, or begin a new run with `napkin train`"
        )
    stored_as = torch.bfloat16 if _precision_of(checkpoint) == "bf16-pure" else torch.float32
    _copy_into(_model_tensors(model), checkpoint.path / "model.safetensors", stored_as=stored_as)


def load_learner(checkpoint: Checkpoint, learner: Learner) -> None:
    """Copy a checkpoint's weights and optimizer state into `learner`, which then goes on as if never stopped.

    Raises as `load_model` does; after CorruptFile, `learner` is only fit to have another checkpoint loaded.
    """
    load_model(checkpoint, learner.model)
    # Into tensors that torch itself has made: those of a mapped file are aligned otherwise, and vector code then sums
    # in another order.
    # What was stored, whatever the precision is now.
    extra = {"loss_scale": LossScale().to_tensor()} if _precision_of(checkpoint) == "fp16" else {}
    _copy_into(_optimizer_tensors(learner) | extra, checkpoint.path / "optimizer.safetensors")
    learner.go_on_from(checkpoint.state.step, extra)


def recipe_changes(checkpoint: Checkpoint, recipe: dict[str, dict[str, Any]]) -> list[str]:
    """What differs between a checkpoint's recipe and the tables given of another: 'model.n_heads 4, was 2'."""
    changes: list[str] = []
    for table, values in recipe.items():
        trained = checkpoint.state.recipe.get(table, {})
        for name in dict.fromkeys((*values, *trained)):
            now, before = values.get(name), trained.get(name)
            if now != before:
                changes.append(f"{table}.{name} is {now}, was {before}")
    return changes


def _copy_into(targets: dict[str, Tensor], path: Path, *, stored_as: torch.dtype | None = None) -> None:
    """Raises CorruptFile for other names, shapes or formats; with `stored_as`, for others than this format."""
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, f"cannot be read as safetensors ({error})") from None
    for name in sorted(targets.keys() | stored.keys()):
        found, wanted = _describe(stored.get(name)), _describe(targets.get(name), stored_as)
        if found != wanted:
            raise _damaged(path, f"does not fit its recipe: tensor '{name}' is {found}, the model's is {wanted}")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(stored[name])


def _describe(tensor: Tensor | None, dtype: torch.dtype | None = None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(dtype or tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _precision_of(checkpoint: Checkpoint) -> str:
    return checkpoint.state.recipe.get("training", {}).get("precision", "")


def _model_tensors(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    """The optimizer's state, by parameter; before the first step it is the zeros that this would make."""
    state_of = learner.optimizer.all_state()
    return {
        f"{key}.{name}": tensor
        for name, parameter in learner.model.named_parameters()
        for key, tensor in state_of.get(parameter, {}).items()
    }


def _refuse_non_finite(tensors: dict[str, dict[str, Tensor]], step: int, folder: Path) -> None:
    for named in tensors.values():
        for name, tensor in named.items():
            smallest, largest = torch.aminmax(tensor)
            if not math.isfinite(smallest.item()) or not math.isfinite(largest.item()):
                raise NapkinError(
                    f"step {step}: tensor '{name}' holds infinity or NaN, no checkpoint is made of it: lower "
                    f"--optimizer.learning-rate; earlier checkpoints in '{folder}' are kept"
                )


def _read_sums(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise _damaged(path, "is no text") from None
    sums = {name: checksum for checksum, _, name in (line.partition("  ") for line in text.splitlines())}
    if sums.keys() != set(_FILES) or text != _format_sums(sums):
        raise _damaged(path, f"does not list {', '.join(_FILES)}")
    return sums


def _format_sums(sums: dict[str, str]) -> str:
    return "".join(f"{sums[name]}  {name}\n" for name in _FILES)


def _checksum(path: Path) -> str:
    checksum = sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            checksum.update(chunk)
    return checksum.hexdigest()


def _damaged(path: Path, how: str) -> CorruptFile:
    return CorruptFile(f"'{path}' {how}: put it back as it was, or remove its folder to begin from an earlier step")
