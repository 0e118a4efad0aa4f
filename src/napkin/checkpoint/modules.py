"""Checkpoints of any torch module and optimizer, for a training loop of one's own.

    save(module, optimizer, "checkpoints/step-100", step=100)
    step = load("checkpoints/step-100", module, optimizer).step

A checkpoint is a folder, written under a hidden name, synced and renamed: `model.safetensors` and
`optimizer.safetensors` have the tensors, `state.json` the rest of the two state dicts, and SHA256SUMS the checksums of
all. There is no pickle: state dicts may hold tensors, numbers, strings, lists, tuples and dicts. Checkpoints of
napkin's own runs, which also know of their recipe and tokenizer, are written by `writer.py`.
"""

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

import napkin
from napkin.checkpoint.shard_files import damaged, read_sums, readable_checksum, write_state, write_tensors
from napkin.checkpoint.state import whole
from napkin.distributed.modules import ShardedOptimizer
from napkin.distributed.process_group import ProcessGroupRanks
from napkin.distributed.ranks import ALONE, RankInfo, Ranks
from napkin.errors import CorruptFile, NapkinError, first_line
from napkin.files import StrPath, already_exists, draft_folder, read_bounded, sync_folder
from napkin.optim.saved_state import full_tensor, is_sharded, part_like, sharded_like

_MOST_STATE_BYTES = 2**28


class _ModuleState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """state.json."""

    format: Literal["napkin-module-checkpoint"]
    version: Literal[1]
    step: int
    values: dict[str, Any]
    model: Any
    optimizer: Any
    libraries: dict[str, str]


@dataclass(frozen=True)
class SavedModule:
    """The contents of a checkpoint besides the state of a module and an optimizer."""

    step: int
    values: dict[str, Any]
    """Numbers and texts of the caller's, such as the seed of its data."""


def save(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: StrPath,
    *,
    step: int = 0,
    values: Mapping[str, Any] | None = None,
) -> Path:
    """Write the state of a module and its optimizer to the new folder `path`, whole or not at all. Returns it.

    Tensors that share memory, such as tied weights, are stored once. With an FSDP module or a `ShardedOptimizer` this
    is a collective: tensors are gathered, and the first rank writes; otherwise one rank calls it.

    Raises NapkinError where `path` exists, where a state dict holds what is neither a tensor nor plain data, and where
    the disk is full.
    """
    path = Path(path)
    ranks = _ranks_of(module, optimizer)
    tensors = {"model": _Stored("model", ranks), "optimizer": _Stored("optimizer", ranks)}
    optimizer_state = None
    if optimizer is not None:
        whole_state = optimizer.full_state_dict if isinstance(optimizer, ShardedOptimizer) else optimizer.state_dict
        optimizer_state = tensors["optimizer"].encode(whole_state(), "optimizer")
    state = _ModuleState(
        format="napkin-module-checkpoint",
        version=1,
        step=step,
        values=dict(values or {}),
        model=tensors["model"].encode(module.state_dict(), "module"),
        optimizer=optimizer_state,
        libraries={"napkin": napkin.__version__, "torch": str(torch.__version__), "python": platform.python_version()},
    )

    def write() -> None:
        if path.exists():
            raise already_exists(path)
        try:
            data = msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n"
            if msgspec.json.decode(data, type=_ModuleState).values != state.values:
                raise NapkinError(f"values for '{path}' are not the same in JSON: use numbers, texts, lists and dicts")
            with draft_folder(path) as draft:
                sums = {
                    f"{stem}.safetensors": write_tensors(draft / f"{stem}.safetensors", whole(stored.tensors))
                    for stem, stored in tensors.items()
                }
                write_state(draft, data, sums)
                if path.exists():
                    raise already_exists(path)
                draft.rename(path)
            sync_folder(path.parent)
        except (OSError, SafetensorError, TypeError) as error:
            raise NapkinError(
                f"'{path}' cannot be written ({first_line(error)}): choose a folder on a disk with free space"
            ) from None

    ranks.broadcast_from_zero(write)
    return path


def load(path: StrPath, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> SavedModule:
    """Give a module, and an optimizer if there is one, the state that `save` has written to `path`.

    Checksums, names, shapes and formats are compared first: nothing is changed unless all of the checkpoint fits.
    FSDP modules and a `ShardedOptimizer` take their part, on each rank, whatever the number of ranks that wrote it.

    Raises CorruptFile for a damaged checkpoint, and NapkinError for one of another module or optimizer.
    """
    path = Path(path)
    for name, expected in read_sums(path).items():
        if readable_checksum(path / name) != expected:
            raise CorruptFile(f"'{path / name}' was truncated or changed: restore it, or load another checkpoint")
    try:
        data = read_bounded(path / "state.json", _MOST_STATE_BYTES, what="a checkpoint")
        state = msgspec.json.decode(data, type=_ModuleState)
        model_state = _decoded(state.model, _read_tensors(path / "model.safetensors"))
        optimizer_state = _decoded(state.optimizer, _read_tensors(path / "optimizer.safetensors"))
        if not isinstance(model_state, dict):
            raise ValueError("its model is not a dict")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path / "state.json", f"does not describe a module's checkpoint ({first_line(error)})") from None
    own_state = module.state_dict()
    _refuse_other_module(path, model_state, own_state)
    if optimizer is not None:
        if optimizer_state is None:
            raise NapkinError(f"'{path}' holds no optimizer: load the module alone")
        _refuse_other_optimizer(path, optimizer_state, optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, each in optimizer_state["state"].items():
            if isinstance(index, int):
                optimizer_state["state"][index] = {key: _part(parameters[index], value) for key, value in each.items()}
        optimizer.load_state_dict(optimizer_state)
    module.load_state_dict({name: _part(own_state[name], value) for name, value in model_state.items()})
    return SavedModule(state.step, state.values)


def _ranks_of(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Ranks:
    """The ranks that have parts of what is to be saved: one, unless something is sharded."""
    if not (isinstance(optimizer, ShardedOptimizer) or any(map(is_sharded, module.parameters()))):
        return ALONE
    info = RankInfo(dist.get_rank(), dist.get_world_size())
    return ProcessGroupRanks(info, dist.distributed_c10d.default_pg_timeout)


@dataclass
class _Stored:
    """The tensors of a state dict as they are found, by the name that they are stored under."""

    stem: str
    ranks: Ranks
    tensors: dict[str, Tensor] = field(default_factory=dict)
    names: dict[tuple[Any, ...], str] = field(default_factory=dict)
    """Names by what is in memory: storage, place, shape and format."""

    def encode(self, value: Any, place: str) -> Any:
        """A state dict as JSON, in which tensors are names; `place` is where it stands, for errors and names."""
        if isinstance(value, Tensor):
            return {"tensor": self._add(value, place)}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, tuple | list):
            items = [self.encode(each, f"{place}.{at}") for at, each in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
            return {"dict": [[key, self.encode(each, f"{place}.{key}")] for key, each in value.items()]}
        raise NapkinError(
            f"{place} is a {type(value).__name__}: a checkpoint holds tensors, numbers, texts, lists, tuples and dicts"
        )

    def _add(self, tensor: Tensor, place: str) -> str:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise NapkinError(f"{place} is a tensor of another layout, or has no numbers: convert it first")
        gathered = full_tensor(tensor.detach())
        key = gathered.untyped_storage().data_ptr(), gathered.storage_offset(), gathered.shape, gathered.stride()
        key = *key, gathered.dtype, gathered.device
        # A gathered tensor may have the address of an earlier one that is already freed.
        if not is_sharded(tensor) and key in self.names and gathered.numel():
            return self.names[key]
        name = place.partition(".")[2]
        self.names[key] = name
        if self.ranks.is_rank_zero:
            on_host = gathered.cpu()
            # The format has no tensors that share memory.
            is_view = on_host.untyped_storage().nbytes() != on_host.nbytes
            self.tensors[name] = on_host.clone().contiguous() if is_view else on_host.contiguous()
        return name


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise damaged(path, f"cannot be read as safetensors ({first_line(error)})") from None


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_decoded(each, tensors) for each in content)
    if kind == "float":
        return float(content)
    if kind != "dict":
        raise ValueError(f"{kind[:40]!r} is not a kind of value")
    return {key: _decoded(each, tensors) for key, each in content}


def _refuse_other_module(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for name in [*own, *saved]:
        expected, actual = _described(own, name), _described(saved, name)
        if expected != actual:
            raise NapkinError(
                f"'{path}' is of another module: '{name}' is {actual} there, and {expected} here: make the module as "
                "it was made when it was saved"
            )


def _described(state: Mapping[str, Any], name: str) -> str:
    if name not in state:
        return "missing"
    value = state[name]
    return (
        f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}" if isinstance(value, Tensor) else "no tensor"
    )


def _refuse_other_optimizer(path: Path, saved: Any, optimizer: torch.optim.Optimizer) -> None:
    try:
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        indices = {index for index in saved["state"] if isinstance(index, int)}
        shapes = {
            index: {k: v.shape for k, v in saved["state"][index].items() if isinstance(v, Tensor)} for index in indices
        }
    except (KeyError, TypeError, AttributeError):
        raise damaged(path / "state.json", "does not describe an optimizer") from None
    own = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own or not indices <= set(range(sum(own))):
        raise NapkinError(
            f"'{path}' is of another optimizer: its groups have {sizes} parameters, those of this one {own}: give it "
            "the same parameters in the same groups"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index in sorted(indices):
        for key, shape in shapes[index].items():
            # Other state than one number is of the parameter's shape in nearly all optimizers, and elsewhere is checked
            # by the optimizer itself.
            if key in ("exp_avg", "exp_avg_sq", "momentum_buffer") and shape != parameters[index].shape:
                raise NapkinError(
                    f"'{path}' is of another optimizer: {key} of parameter {index} has shape {tuple(shape)} there, the "
                    f"parameter here {tuple(parameters[index].shape)}: give it the same parameters in the same order"
                )


def _part(own: Any, value: Any) -> Any:
    """This rank's part of a tensor, copied out of the file; any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(own, Tensor) and is_sharded(own) and own.shape == value.shape:
        return sharded_like(own, part_like(own, value).clone().to(own.device))
    return value.clone()
