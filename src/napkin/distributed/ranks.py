"""The processes that train one run together: which rank this one is, their collective operations, and meshes of them.

torchrun starts them and passes each its rank in the environment. A single process is rank 0 of a world of size 1, and
does not use torch.distributed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from napkin.errors import NapkinError
from napkin.recipe.layout import DIMENSIONS, Layout

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class RankInfo:
    """This process among those of its job."""

    rank: int = 0
    """Rank 0 writes the run's files and prints."""
    world_size: int = 1
    local_rank: int = 0
    """Rank on this machine: the index of its GPU."""
    local_world_size: int = 1
    restart_count: int = 0
    """Number of times that torchrun has restarted the job after a process was lost."""


class Ranks:
    """Processes that train one run together, each with its own rows of every batch. This class is a world of size 1.

    All ranks call the same methods in the same order. Values are sent between them as JSON.
    """

    def __init__(self, info: RankInfo) -> None:
        self.info = info

    @property
    def world_size(self) -> int:
        return self.info.world_size

    @property
    def is_rank_zero(self) -> bool:
        """True if this process writes the run's files and prints."""
        return self.info.rank == 0

    def threads(self, chosen: int | None, cores: int) -> int:
        """CPU threads of this process: the chosen number, and at most its part of the machine's cores."""
        if self.world_size == 1:
            return chosen or cores
        part = max(1, cores // self.info.local_world_size)
        return min(chosen or part, part)

    def broadcast_from_zero(self, make: Callable[[], Any]) -> Any:
        """Rank 0 runs `make` and broadcasts the result; if it raises, the other ranks exit silently."""
        return make()

    def all_gather(self, value: Any) -> list[Any]:
        """The value of every rank, by rank."""
        return [value]

    def all_reduce_max(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        return number

    def all_reduce_sum(self, tensor: "Tensor") -> "Tensor":
        """The sum of all ranks' tensors."""
        return tensor

    def separate_group(self) -> "Ranks":
        """The same ranks in a separate process group: the collectives of a thread cannot interleave with others."""
        return self


ALONE = Ranks(RankInfo())


def rank_info_of(environment: Mapping[str, str]) -> RankInfo:
    """The rank that torchrun has set in the environment; a world of size 1 without torchrun.

    Raises NapkinError for variables that contradict each other.
    """
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return RankInfo()

    def number(name: str, default: str = "") -> int:
        value = environment.get(name, default)
        if not value.isdecimal():
            raise NapkinError(f"the environment's {name} is '{value}', not a number: start ranks with torchrun")
        return int(value)

    rank, world_size, local_rank = number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK")
    local_world_size = number("LOCAL_WORLD_SIZE", str(local_rank + 1))
    if not (rank < world_size and local_rank < local_world_size <= world_size):
        raise NapkinError(
            f"the environment has rank {rank} of {world_size}, {local_rank} of {local_world_size} on this machine, "
            "which is impossible: start ranks with torchrun"
        )
    return RankInfo(rank, world_size, local_rank, local_world_size, number("TORCHELASTIC_RESTART_COUNT", "0"))


def make_mesh(layout: Layout, device_type: str) -> "DeviceMesh":
    """A mesh over all ranks of the default process group, its dimensions named as the layout's.

    A collective: all ranks call it.
    """
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, tuple(layout.sizes.values()), mesh_dim_names=DIMENSIONS)


def flattened(mesh: "DeviceMesh", *dimensions: str) -> "DeviceMesh":
    """The ranks of several neighbouring dimensions as a mesh of one dimension; a collective."""
    if len(dimensions) == 1:
        return mesh[dimensions[0]]
    return mesh[dimensions]._flatten("_".join(dimensions))


def experts_are_sharded(layout: Layout) -> bool:
    """True if groups of ranks that split the experts are within those that shard parameters, which then shard the
    experts further."""
    return layout.shard % layout.expert == 0 and layout.shard * layout.context > layout.expert


def make_expert_mesh(layout: Layout, device_type: str) -> "DeviceMesh":
    """The ranks of data and shard as groups of neighbours that split the experts ("expert"), and the replicas of these:
    "shards" of them, which shard the experts further if `experts_are_sharded`, and "replicas".

    A collective. The other dimensions are those of the layout.
    """
    from torch.distributed.device_mesh import init_device_mesh

    shards = layout.shard // layout.expert if experts_are_sharded(layout) else 1
    sizes = {
        "pipeline": layout.pipeline,
        "replicas": layout.batch_parts // layout.expert // shards,
        "shards": shards,
        "expert": layout.expert,
        "context": layout.context,
        "tensor": layout.tensor,
    }
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def combined(*meshes: "DeviceMesh") -> "DeviceMesh":
    """Several meshes of one dimension, flattened ones too, as one with all their dimensions."""
    # torch's own slicing takes a flattened dimension only with a warning that it will not for long.
    return type(meshes[0])._concatenate(list(meshes))
