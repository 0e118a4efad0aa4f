"""One rank of a world that does not exist: torch's fake process group, whose collectives return at once.

It lets a process trace what one rank does in a step, even if the process has process groups of its own: while the block
runs, torch's table of groups is replaced by an empty one.
"""

import datetime
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _set_global_rank, _unregister_process_group
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn.parallel import distributed as ddp
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from napkin.distributed.process_group import ProcessGroupRanks
from napkin.distributed.ranks import RankInfo

_FIRST_NAMES = itertools.count(10**9, 10**6)
"""torch names groups by a counter; a name stands for one group in all of the process."""


class FakeRanks(ProcessGroupRanks):
    """The ranks of a fake process group. Collectives return this rank's values, as if all other ranks had the same."""

    def broadcast_from_zero(self, make: Callable[[], Any]) -> Any:
        return make()

    def all_gather(self, value: Any) -> list[Any]:
        """The value, as often as there are ranks."""
        return [value] * self.world_size

    def all_reduce_max(self, number: int) -> int:
        return number

    def separate_group(self) -> "FakeRanks":
        return self


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[FakeRanks]:
    """This process as one rank of `world_size`, under a FakeTensorMode.

    Process groups and meshes made in the block end with it. Other threads must not use torch.distributed meanwhile.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    real_world, real_hook = distributed_c10d._world, sys.excepthook
    world = _SeparateWorld()
    with ExitStack() as changes:
        changes.callback(forget_meshes)
        changes.enter_context(patch.object(distributed_c10d, "_world", world))
        forget_meshes()
        try:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
            for home, name in (
                (device_mesh, "init_device_mesh"),
                (dist, "init_device_mesh"),
                *((DeviceMesh, method) for method in ("__init__", "_flatten", "_unflatten")),
            ):
                changes.enter_context(patch.object(home, name, _on_real(getattr(home, name))))
            ranks_of_mesh = property(_on_real(DeviceMesh.mesh.fget))  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
            changes.enter_context(patch.object(DeviceMesh, "mesh", ranks_of_mesh))
            changes.enter_context(_ddp_on_fakes())
            changes.enter_context(patch.object(_fsdp_param, "_chunk_with_empty", _Shards))
            yield FakeRanks(RankInfo(rank, world_size, 0, 1), datetime.timedelta(hours=1))
        finally:
            for group in world.pg_names.values():
                _unregister_process_group(group)
            _set_global_rank(-1 if real_world.default_pg is None else real_world.default_pg.rank())
            sys.excepthook = real_hook


class _SeparateWorld(distributed_c10d._World):
    """torch's table of process groups, empty, and with names that no other group has."""

    def __init__(self) -> None:
        super().__init__()
        self._tables: dict[str, dict[Any, Any]] = {}
        self._count = next(_FIRST_NAMES)

    def _table(self, name: str) -> dict[Any, Any]:
        return self._tables.setdefault(name, {})

    pg_map = property(lambda self: self._table("map"))  # pyright: ignore[reportIncompatibleMethodOverride]
    pg_names = property(lambda self: self._table("names"))  # pyright: ignore[reportIncompatibleMethodOverride]
    pg_group_ranks = property(lambda self: self._table("group ranks"))  # pyright: ignore[reportIncompatibleMethodOverride]
    pg_backend_config = property(lambda self: self._table("backends"))  # pyright: ignore[reportIncompatibleMethodOverride]
    tags_to_pg = property(lambda self: self._table("by tag"))  # pyright: ignore[reportIncompatibleMethodOverride]
    pg_to_tag = property(lambda self: self._table("tags"))  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def group_count(self) -> int:
        """The number in the name of the next group."""
        return self._count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._count = value


def forget_meshes() -> None:
    """DTensor remembers the mesh of its results; meshes of equal shape are equal, whichever groups they have."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        clear_redistribute_planner_cache()


def _on_real(function: Callable[..., Any]) -> Callable[..., Any]:
    """A mesh reads the numbers of its ranks from a tensor: a fake one has none."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


@contextmanager
def _ddp_on_fakes() -> Iterator[None]:
    """DDP compares shapes and buckets of all ranks, in C++, as integers in tensors that it reads: they stay real."""

    def under_real_integers(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _RealIntegers():
                return function(*args, **kwargs)

        return run

    verify, forward = "_verify_param_shape_across_processes", "_pre_forward"
    wrapped = ddp.DistributedDataParallel
    with (
        patch.object(ddp, verify, under_real_integers(getattr(ddp, verify))),
        patch.object(wrapped, forward, under_real_integers(getattr(wrapped, forward))),
    ):
        yield


class _Shards:
    """The shards of a parameter, made when asked for: FSDP2 cuts it for all ranks and looks at two of them."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self.tensor, self.dim = tensor, dim
        self.size = -(-tensor.shape[dim] // num_chunks)

    def __getitem__(self, rank: int) -> Tensor:
        begin = rank * self.size
        length = min(self.size, self.tensor.shape[self.dim] - begin)
        # torch.chunk makes fewer shards than ranks where the dimension does not suffice.
        return self.tensor.narrow(self.dim, begin, length) if length > 0 else self.tensor.new_empty(0)


class _RealIntegers(TorchDispatchMode):
    """New tensors of integers are real, and what is computed from real tensors alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        new_integers = not tensors and kwargs.get("dtype") in (torch.int32, torch.int64)
        if new_integers or (tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors)):
            with _disable_current_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)
