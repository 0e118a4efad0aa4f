"""The fake twin of a module whose parameters FSDP2 shards: copied as it was before, and sharded again on fake ranks.

FSDP2's own state is not copied: it holds process groups and the hooks by which it gathers. The arguments of
`fully_shard` for each part (its mesh, its policies, whether it reshards after a forward pass) are read from that state.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import device_mesh
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Shard

from napkin.errors import NapkinError

HOOKS = "_forward_pre_hooks", "_forward_hooks"


def is_fully_sharded(module: nn.Module) -> bool:
    return any(isinstance(part, FSDPModule) for part in module.modules())


def of_fully_sharded(module: nn.Module, copied: Callable[[], nn.Module], memo: dict[int, Any]) -> nn.Module:
    """A twin of `module` on the ranks of the default process group.

    `copied` copies the module, by the memo of deep copies that it shares with this function. Raises NapkinError for
    what is sharded otherwise: several modules as one, parameters on meshes of their own, tensor parallelism.
    """
    parts = {name: part for name, part in module.named_modules() if isinstance(part, FSDPModule)}
    settings = {name: _settings_of(part) for name, part in parts.items()}
    for name, parameter in module.named_parameters():
        memo[id(parameter)] = _whole(name, parameter)
    with _as_before(list(parts.values()), memo):
        twin = copied()
    for part in twin.modules():
        for name in HOOKS:
            hooks = getattr(part, name)
            for key in [key for key, hook in hooks.items() if hook is None]:
                del hooks[key]
        for key in (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            vars(part).pop(key, None)
    meshes: dict[tuple[Any, ...], DeviceMesh] = {}
    # Inner parts first: each part takes the parameters that none of its inner parts has taken.
    for name, (mesh, options) in reversed(settings.items()):
        key = tuple(mesh.shape), mesh.mesh_dim_names
        if key not in meshes:
            # Fake ranks replace the function of that name.
            meshes[key] = device_mesh.init_device_mesh("cpu", key[0], mesh_dim_names=key[1])
        fully_shard(twin.get_submodule(name), mesh=meshes[key], **options)
    for original, parameter in zip(module.parameters(), twin.parameters(), strict=True):
        memo[id(original)] = parameter
    return twin


def _settings_of(part: Any) -> tuple[DeviceMesh, dict[str, Any]]:
    state: FSDPState = part._get_fsdp_state()
    groups = state._fsdp_param_groups
    if len(groups) != 1 or len(state._modules) != 1:
        raise NapkinError(f"{len(groups)} groups of parameters are sharded for one call of fully_shard: not traced")
    (group,) = groups
    after: Any = group.post_forward_mesh_info
    reshards: bool | int | None = after is not None
    if after is not None and after is not group.mesh_info:
        reshards = after.shard_mesh_size
    if state._auto_reshard_after_forward:
        reshards = None
    options = {
        "reshard_after_forward": reshards,
        "mp_policy": group.mp_policy,
        "offload_policy": group.offload_policy,
    }
    return group.mesh_info.mesh, options


def _whole(name: str, parameter: nn.Parameter) -> nn.Parameter:
    """A parameter as it was before it was sharded, without numbers."""
    if isinstance(parameter, DTensor):
        placements = parameter.placements
        if any(isinstance(each, Shard) and each.dim for each in placements) or sum(map(_is_shard, placements)) > 1:
            raise NapkinError(f"'{name}' is sharded as {placements}: only what fully_shard shards by rows is traced")
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _is_shard(placement: Any) -> bool:
    return isinstance(placement, Shard)


@contextmanager
def _as_before(parts: list[Any], memo: dict[int, Any]) -> Iterator[None]:
    """The modules are of their own classes in the block, and copies have neither FSDP2's state nor its hooks."""
    classes = [type(part) for part in parts]
    for part in parts:
        state = part._get_fsdp_state()
        memo[id(state)] = None
        for name in HOOKS:
            memo |= {
                id(hook): None for hook in getattr(part, name).values() if getattr(hook, "__self__", None) is state
            }
    try:
        for part, kind in zip(parts, classes, strict=True):
            # FSDP2 has put its own class before the module's.
            part.__class__ = kind.__bases__[1]
        yield
    finally:
        for part, kind in zip(parts, classes, strict=True):
            part.__class__ = kind
