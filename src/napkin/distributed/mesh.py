"""The device mesh of a layout: torch's DeviceMesh with one dimension for each of the layout's."""

from typing import TYPE_CHECKING

from napkin.recipe.layout import DIMENSIONS, Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
