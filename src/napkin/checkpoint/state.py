"""The state of a run after a step, as a checkpoint holds it: tensors by name, and state.json.

Weights that a run does not train are kept once beside its checkpoints: `frozen/` holds model.safetensors, with the
tensors as the run holds them, and SHA256SUMS. It is written with the run's folder and never changed. A checkpoint of
such a run holds what is trained, and lists the checksum of the frozen weights that it goes with: a run needs nothing
but its own folder.
"""

import dataclasses
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

import napkin
from napkin.checkpoint.shard_files import (
    SUMS,
    copy_files_into,
    damaged,
    formats_of,
    frozen_path,
    is_finite,
    parse_sums,
    readable_checksum,
    write_sums,
    write_tensors,
)
from napkin.errors import NapkinError
from napkin.files import draft_folder, sync_folder
from napkin.json_files import LARGEST
from napkin.model.transformer import Transformer
from napkin.optim.tensor_parts import Part, Parts, parts_of
from napkin.runs.metrics import History
from napkin.train_step.step import TrainState


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """state.json: the metadata of a checkpoint."""

    format: Literal["napkin-checkpoint"]
    version: Literal[1]
    step: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    """Updates done."""
    seconds: Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]
    """Seconds of training so far."""
    tokenizer: str
    """The tokenizer's fingerprint."""
    train_tokens: str
    """SHA-256 of the training tokens."""
    recipe: dict[str, dict[str, Any]]
    """The resolved recipe, with every field."""
    libraries: dict[str, str]
    history: History = msgspec.field(default_factory=History)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    state: State
    frozen: str | None = None
    """SHA-256 of the frozen weights that belong to it; None where it holds the whole model."""


@dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint, in memory; of several ranks' checkpoint, what this rank writes."""

    step: int
    files: dict[str, Parts]
    """Tensors by the name of their file: the train state's own, not copies."""
    state: bytes
    """state.json."""
    frozen: str | None = None
    """SHA-256 of the run's frozen weights, if it has any."""

    @property
    def bytes(self) -> int:
        """Bytes of its files on the disk, without some kilobytes of names."""
        return sum(part.tensor.nbytes for part in self.parts()) + len(self.state)

    def parts(self) -> Iterator[Part]:
        return (part for named in self.files.values() for parts in named.values() for part in parts)


def snapshot(
    train_state: TrainState,
    *,
    step: int,
    seconds: float,
    tokenizer: str,
    train_tokens: str,
    history: History | None = None,
    frozen: str | None = None,
) -> Snapshot:
    """The contents of a checkpoint of `train_state`, as far as this rank has them. Its tensors are the train state's,
    not copies; `frozen` is the checksum of the weights that are not trained, which are kept elsewhere."""
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
    model = train_state.parallel_model
    files = {f"{stem}.safetensors": model.parts(named) for stem, named in tensors_of(train_state).items()}
    return Snapshot(step, files, msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n", frozen)


def tensors_of(train_state: TrainState) -> dict[str, dict[str, Tensor]]:
    """All tensors of a checkpoint that this rank has parts of, by the stem of their file and by name, in the order in
    which they are stored."""
    rest = optimizer_tensors(train_state) | train_state.extra_state()
    return {"model": trained_tensors(train_state.model), "optimizer": rest}


def whole(named: dict[str, Tensor]) -> Parts:
    """Tensors that a single process holds completely."""
    return {name: parts_of(tensor) for name, tensor in named.items()}


def model_tensors(model: Transformer) -> dict[str, Tensor]:
    """Parameters by name, detached."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained_tensors(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def frozen_tensors(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.requires_grad}


def optimizer_tensors(train_state: TrainState, *, average: bool = True) -> dict[str, Tensor]:
    """The optimizer state, by parameter; before the first step it is the zeros that the step would create.

    With `average`, also the averaged weights if there are any.
    """
    state_of = train_state.optimizer.all_state()
    tensors = {
        f"{key}.{name}": tensor
        for name, parameter in train_state.model.named_parameters()
        for key, tensor in state_of.pop(parameter, {}).items()
    }
    assert not state_of, "the optimizer has other parameters than the model"
    if average and train_state.average is not None:
        # Frozen weights have none.
        names = (name for name, each in train_state.model.named_parameters() if each.requires_grad)
        tensors |= {f"average.{name}": tensor for name, tensor in zip(names, train_state.average.averages, strict=True)}
    return tensors


def write_frozen(checkpoints: Path, model: Transformer) -> str:
    """Write the weights of a model that are not trained, whole or not at all. Returns their checksum.

    Raises NapkinError where a number is infinite or NaN, and where the disk is full or cannot be written.
    """
    path, named = frozen_path(checkpoints), frozen_tensors(model)
    for name, tensor in named.items():
        if not is_finite(tensor):
            raise NapkinError(f"tensor '{name}' of the start holds infinity or NaN: start from another model")
    try:
        with draft_folder(path.parent) as draft:
            checksum = write_tensors(draft / path.name, whole(named))
            write_sums(draft, {path.name: checksum})
            draft.rename(path.parent)
            sync_folder(checkpoints)
    except (OSError, SafetensorError) as error:
        raise NapkinError(
            f"the frozen weights cannot be written ({error}): free some space, or choose a --run on another disk"
        ) from None
    return checksum


def load_frozen(checkpoints: Path, parts: Parts) -> None:
    """Copy frozen weights, verified by their checksum, into the parts of a model that has nothing else. Raises
    CorruptFile."""
    path, expected = frozen_path(checkpoints), frozen_checksum(checkpoints)
    if readable_checksum(path) != expected:
        raise damaged(path, f"was truncated or changed, its SHA-256 is not the one in {SUMS}")
    copy_files_into(parts, [path], stored_as=formats_of(path))


def frozen_checksum(checkpoints: Path) -> str:
    """The checksum of frozen weights as they were written. Raises CorruptFile."""
    path = frozen_path(checkpoints)
    return parse_sums(path.parent)[0].get(path.name, "")


def has_frozen(checkpoints: Path) -> bool:
    return os.path.lexists(frozen_path(checkpoints).parent)


def keep_frozen(checkpoints: Path, model: Transformer) -> str | None:
    """The checksum of a model's frozen weights, which are written if they are not there; None where it has none."""
    if not frozen_tensors(model):
        return None
    return frozen_checksum(checkpoints) if has_frozen(checkpoints) else write_frozen(checkpoints, model)
