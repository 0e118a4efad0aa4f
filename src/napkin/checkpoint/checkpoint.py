"""Checkpoints: the state of a run after a step, on disk, whole or not at all.

`step-00000200/` holds model.safetensors, optimizer.safetensors, state.json, and SHA256SUMS over the three, in the
form that `sha256sum -c` reads; where ranks hold the model by rows, each has files of its own in place of the first two.
The folder is written under a hidden name, every file synced, and then renamed. Nothing in it is a program: tensors are
safetensors, the rest is text.
"""

import dataclasses
import math
import platform
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import napkin
from napkin.checkpoint.checksums import SUMS, TENSOR_FILES, checksum_of, damaged, read_sums, write_state
from napkin.checkpoint.shard_files import Misfit, copy_rows_into, describe, is_by_rows
from napkin.errors import CorruptFile, NapkinError
from napkin.files import sync_file, sync_folder
from napkin.model.transformer import Transformer
from napkin.optim.loss_scale import LossScale
from napkin.recipe.recipe import Recipe
from napkin.runs.history import History
from napkin.runs.run_folder import lower_learning_rate
from napkin.train_step.step import TrainState

_NAME = re.compile(r"step-(\d{8,})")
# Torch splits reductions of more numbers among its threads.
_SERIAL_NUMEL = 2**15


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
    history: History = msgspec.field(default_factory=History)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    state: State


@dataclass(frozen=True)
class Snapshot:
    """All that a checkpoint will hold, in memory."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    """By file and name; the train state's own, until they are copied."""
    state: bytes
    """state.json."""

    @property
    def bytes(self) -> int:
        """What its files take on the disk, some kilobytes of names aside."""
        return sum(tensor.nbytes for named in self.tensors.values() for tensor in named.values()) + len(self.state)


def save_checkpoint(
    folder: Path,
    train_state: TrainState,
    *,
    step: int,
    seconds: float,
    tokenizer: str,
    train_tokens: str,
    history: History | None = None,
) -> Checkpoint:
    """Write `folder`/step-XXXXXXXX and return it: `snapshot` and `write_checkpoint` in one."""
    taken = snapshot(
        train_state, step=step, seconds=seconds, tokenizer=tokenizer, train_tokens=train_tokens, history=history
    )
    return write_checkpoint(folder, taken)


def snapshot(
    train_state: TrainState,
    *,
    step: int,
    seconds: float,
    tokenizer: str,
    train_tokens: str,
    history: History | None = None,
) -> Snapshot:
    """What a checkpoint of `train_state` holds; its tensors are the train state's own and go on changing with it."""
    state = State(
        format="napkin-checkpoint",
        version=1,
        step=step,
        seconds=seconds,
        tokenizer=tokenizer,
        train_tokens=train_tokens,
        recipe=dataclasses.asdict(train_state.recipe),
        libraries={"napkin": napkin.__version__, "torch": str(torch.__version__), "python": platform.python_version()},
        history=history or History(),
    )
    tensors = {f"{stem}.safetensors": named for stem, named in tensors_of(train_state).items()}
    return Snapshot(step, tensors, msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")


def write_checkpoint(
    folder: Path, taken: Snapshot, *, before_publishing: Callable[[], None] = lambda: None
) -> Checkpoint:
    """Write `folder`/step-XXXXXXXX and return it; one that is there already and whole is kept as it is.

    The tensors go to the file from where they are: nothing is copied, but from a GPU. `before_publishing` is called
    when all is on the disk but the checkpoint's name. Raises NapkinError where the disk is full or cannot be written,
    and where a tensor holds infinity or NaN; earlier checkpoints stay untouched.
    """
    path = checkpoint_path(folder, taken.step)
    if path.exists():
        try:
            return read_checkpoint(path)
        except CorruptFile:
            set_aside(path)
    refuse_non_finite(taken.tensors, taken.step, folder)
    draft = folder / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        draft.mkdir()
        for name, named in taken.tensors.items():
            save_file(named, draft / name)
            # The library makes files for their owner alone; a run's other files are made as the user's umask says.
            (draft / name).chmod(draft.stat().st_mode & 0o666)
            sync_file(draft / name)
        write_state(draft, taken.state, {name: checksum_of(draft / name) for name in TENSOR_FILES})
        before_publishing()
        draft.rename(path)
        sync_folder(folder)
    except (OSError, SafetensorError, NapkinError) as error:
        raise NapkinError(
            f"'{path}' cannot be written ({error}): make room and continue with `napkin resume {folder.parent}`, "
            "earlier checkpoints are kept"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Checkpoint(path, msgspec.json.decode(taken.state, type=State))


def prune_checkpoints(folder: Path, *, keep: int, best: int | None = None) -> None:
    """Remove all but the `keep` newest checkpoints and that of step `best`, and what killed writers left behind."""
    for path in checkpoint_paths(folder)[keep:]:
        if best is not None and path == checkpoint_path(folder, best):
            continue
        # Renamed first: a kill half-way through leaves no checkpoint with files missing.
        path.rename(path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp"))
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


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


def read_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """A checkpoint whose files are, to the bit, as they were written; unless `verify`, as somebody else has seen.

    Raises CorruptFile naming the file and what is wrong with it.
    """
    expected = read_sums(path)
    for name in expected if verify else ():
        try:
            found = checksum_of(path / name)
        except OSError as error:
            raise damaged(path / name, f"cannot be read ({error.strerror})") from None
        if found != expected[name]:
            raise damaged(path / name, f"was shortened or altered, its SHA-256 is not the one in {SUMS}")
    try:
        state = msgspec.json.decode((path / "state.json").read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise damaged(path / "state.json", f"does not describe a checkpoint of this version ({error})") from None
    if path != checkpoint_path(path.parent, state.step):
        raise damaged(path / "state.json", f"describes another checkpoint, of step {state.step}")
    return Checkpoint(path, state)


def load_model(checkpoint: Checkpoint, model: Transformer) -> None:
    """Copy a checkpoint's weights into `model`.

    Raises NapkinError where `model` is of another config than the one that was trained, also where the weights would
    fit; CorruptFile where they do not. `model` is untouched then.
    """
    _refuse_other_model(checkpoint, model)
    stored_as = torch.bfloat16 if _precision_of(checkpoint) == "bf16-pure" else torch.float32
    _copy_into(_model_tensors(model), checkpoint.path / "model.safetensors", stored_as=stored_as)


def load_averaged_model(checkpoint: Checkpoint, model: Transformer) -> None:
    """Copy a checkpoint's averaged weights into `model`, or its weights where it has no average.

    Raises as `load_model` does.
    """
    if not keeps_average(checkpoint):
        load_model(checkpoint, model)
        return
    _refuse_other_model(checkpoint, model)
    path = checkpoint.path / "optimizer.safetensors"
    targets = {f"average.{name}": tensor for name, tensor in _model_tensors(model).items()}
    _copy_into(targets, path, stored_as=torch.float32, among_others=True)


def load_train_state(checkpoint: Checkpoint, train_state: TrainState) -> None:
    """Copy a checkpoint's weights and optimizer state into `train_state`, which then goes on as if never stopped.

    An average that the checkpoint does not have begins with its weights. Raises as `load_model` does; after
    CorruptFile, `train_state` is only fit to have another checkpoint loaded.
    """
    load_model(checkpoint, train_state.model)
    updates = checkpoint.state.step - checkpoint.state.history.skipped
    # Into tensors that torch itself has made: those of a mapped file are aligned otherwise, and vector code then sums
    # in another order.
    # What was stored, whatever the precision is now.
    extra = {"loss_scale": LossScale().to_tensor()} if _precision_of(checkpoint) == "fp16" else {}
    has_average = keeps_average(checkpoint)
    _copy_into(
        _optimizer_tensors(train_state, average=has_average) | extra,
        checkpoint.path / "optimizer.safetensors",
        among_others=has_average and not train_state.average,
    )
    train_state.go_on_from(updates, extra, with_average=has_average)


def keeps_average(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds an average of the weights besides them."""
    return bool(checkpoint.state.recipe.get("optimizer", {}).get("average_decay"))


def recipe_changes(checkpoint: Checkpoint, recipe: dict[str, dict[str, Any]]) -> list[str]:
    """What differs between a checkpoint's recipe and the tables given of another: 'model.n_heads 4, was 2'."""
    changes: list[str] = []
    defaults = dataclasses.asdict(Recipe())
    # Until there was a choice, nothing was compiled.
    defaults["training"]["compile"] = "off"
    for table, values in recipe.items():
        # A field that came later has had its default until then.
        trained = defaults.get(table, {}) | checkpoint.state.recipe.get(table, {})
        for name in dict.fromkeys((*values, *trained)):
            now, before = values.get(name), trained.get(name)
            if now != before:
                changes.append(f"{table}.{name} is {now}, was {before}")
    return changes


def _refuse_other_model(checkpoint: Checkpoint, model: Transformer) -> None:
    config = dataclasses.asdict(model.config)
    # All forms of attention are forms of one model.
    config["attention"] = checkpoint.state.recipe.get("model", {}).get("attention", Recipe().model.attention)
    changes = recipe_changes(checkpoint, {"model": config})
    if changes:
        raise NapkinError(
            f"the recipe is not the one that '{checkpoint.path}' was trained with: {', '.join(changes)}: "
            "put that back, or begin a new run with `napkin train`"
        )


def _copy_into(
    targets: dict[str, Tensor], path: Path, *, stored_as: torch.dtype | None = None, among_others: bool = False
) -> None:
    """Copy all tensors of a file, or those that are wanted `among_others`.

    Raises CorruptFile for other names, shapes or formats; with `stored_as`, for others than this format.
    """
    if is_by_rows(targets, path):
        try:
            return copy_rows_into(targets, path, stored_as=stored_as, among_others=among_others)
        except Misfit as misfit:
            raise damaged(misfit.path, misfit.how) from None
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise damaged(path, f"cannot be read as safetensors ({error})") from None
    for name in sorted(targets.keys() if among_others else targets.keys() | stored.keys()):
        found, wanted = describe(stored.get(name)), describe(targets.get(name), stored_as)
        if found != wanted:
            raise damaged(path, f"does not fit its recipe: tensor '{name}' is {found}, the model's is {wanted}")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(stored[name])


def tensors_of(train_state: TrainState) -> dict[str, dict[str, Tensor]]:
    """Weights and the rest by name, in the order in which they are stored."""
    rest = _optimizer_tensors(train_state) | train_state.extra_state()
    return {"model": _model_tensors(train_state.model), "optimizer": rest}


def _precision_of(checkpoint: Checkpoint) -> str:
    return checkpoint.state.recipe.get("training", {}).get("precision", "")


def _model_tensors(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _optimizer_tensors(train_state: TrainState, *, average: bool = True) -> dict[str, Tensor]:
    """The optimizer's state, by parameter; before the first step it is the zeros that this would make.

    With `average`, that of the weights too where there is one.
    """
    state_of = train_state.optimizer.all_state()
    tensors = {
        f"{key}.{name}": tensor
        for name, parameter in train_state.model.named_parameters()
        for key, tensor in state_of.get(parameter, {}).items()
    }
    if average and train_state.average is not None:
        names = (name for name, _ in train_state.model.named_parameters())
        tensors |= {f"average.{name}": tensor for name, tensor in zip(names, train_state.average.averages, strict=True)}
    return tensors


def refuse_non_finite(tensors: dict[str, dict[str, Tensor]], step: int, folder: Path) -> None:
    """Raise NapkinError where a number is infinite or NaN."""
    for named in tensors.values():
        for name, tensor in named.items():
            if not _is_finite(tensor):
                raise NapkinError(
                    f"step {step}: tensor '{name}' holds infinity or NaN, no checkpoint is made of it: "
                    f"{lower_learning_rate(folder.parent)}"
                )


def _is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are; on a CPU by one thread: training may want the others at the same time."""
    pieces = tensor.detach().flatten().split(_SERIAL_NUMEL) if tensor.device.type == "cpu" else [tensor]
    return all(math.isfinite(each.item()) for piece in pieces if piece.numel() for each in torch.aminmax(piece))
