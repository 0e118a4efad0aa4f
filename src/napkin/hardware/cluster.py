"""Clusters by name: "64xH100" (in nodes as sold), "8x8xH100" (8 nodes of 8), "16xDGX-H100" (16 such nodes)."""

import dataclasses
import re
from dataclasses import dataclass

from napkin.errors import NapkinError
from napkin.hardware.accelerators import find_device
from napkin.hardware.device import Device
from napkin.hardware.node import Node, node_of, nodes
from napkin.near_names import near_names, plain
from napkin.units import parse_devices

_MOST_DEVICES = 10**7
"""More than have ever been built into one system: a larger number is a mistake."""


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind in nodes of one kind; the last node may be partly used."""

    device: Device
    node: Node
    n_devices: int

    @property
    def n_nodes(self) -> int:
        """Number of nodes that hold the devices."""
        return -(-self.n_devices // self.node.devices)


def find_cluster(name: str) -> Cluster:
    """Find a cluster by its name: a number of devices, of nodes and devices per node, or of nodes of a known kind.

    Raises NapkinError for a name that is none of these.

    >>> cluster = find_cluster("64xH100")
    >>> cluster.device.name, cluster.n_nodes, cluster.node.name
    ('H100-SXM-80GB', 8, 'DGX-H100')
    >>> find_cluster("4x16xA100").node.devices, find_cluster("2xGB200-NVL72").n_devices
    (16, 144)
    """
    number, rest = parse_devices(name)
    per_node, rest = parse_devices(rest) if re.match(r"[0-9]+\s*[x×]", rest) else (None, rest)
    node = next((node for node in nodes() if plain(node.name) == plain(rest)), None)
    if node is not None:
        if per_node is not None:
            raise NapkinError(f"{name!r}: a {node.name} has {node.devices} devices: write {number}x{node.name}")
        return _bounded(Cluster(find_device(node.device), node, number * node.devices), name)
    try:
        device = find_device(rest)
    except NapkinError:
        near = near_names(rest, [node.name for node in nodes()])
        if near and near[0][:3].lower() == rest[:3].lower():
            raise NapkinError(f"{rest!r} is not a known accelerator or node: did you mean {near[0]!r}?") from None
        raise
    node = node_of(device)
    if per_node is None:
        return _bounded(Cluster(device, node, number), name)
    return _bounded(Cluster(device, dataclasses.replace(node, devices=per_node), number * per_node), name)


def _bounded(cluster: Cluster, name: str) -> Cluster:
    if cluster.n_devices > _MOST_DEVICES:
        raise NapkinError(f"{name!r} is {cluster.n_devices:,} devices: use at most {_MOST_DEVICES:,}")
    return cluster
