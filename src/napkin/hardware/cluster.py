"""Clusters by name: "64xH100" (in nodes as sold), "8x8xH100" (8 nodes of 8), "16xDGX-H100" (16 such nodes).

How many devices one fast link connects, and what connects such nodes, is in nodes.toml; the seconds of collectives on
them follow the α–β model, a latency for each hop and bytes over a bandwidth.
"""

import dataclasses
import functools
import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from napkin.errors import NapkinError, near_names, plain
from napkin.hardware.ceilings import Efficiency
from napkin.hardware.device import Device, Positive, Source
from napkin.hardware.device_file import find_device
from napkin.hardware.kernel_curves import KernelCurves, curves_of
from napkin.toml_files import packaged_toml
from napkin.units import parse_devices

DEFAULT_DEVICES = 8
"""Per node, of a device that no node of the table has."""
DEFAULT_NETWORK_BANDWIDTH = 25e9
"""Bytes per second and device, one way, between such nodes: 200 Gbit/s for each device."""


@dataclass(frozen=True)
class Node:
    """Devices that one fast link connects: a server, a rack or a pod."""

    name: str
    device: str
    """Name of its devices in the catalogue."""
    devices: Annotated[int, msgspec.Meta(gt=0)]
    network: str | None = None
    """Network that connects nodes; None where the fast link is all there is."""
    network_bandwidth: Positive | None = None
    """Bytes per second between nodes, per device and one way."""
    source: Source | None = None
    """Source of the figures; None for a node that was assumed."""


@functools.cache
def nodes() -> tuple[Node, ...]:
    """All nodes of the table, in order."""
    return packaged_toml("napkin.hardware", "nodes.toml", tuple[Node, ...], "node")


def node_of(device: Device) -> Node:
    """The node that a device is assumed to be in: the one that its file describes, else the first that the table has,
    else `DEFAULT_DEVICES` of them.

    >>> from napkin.hardware.device_file import find_device
    >>> node_of(find_device("H100")).name, node_of(find_device("L4")).devices
    ('DGX-H100', 8)
    """
    if device.devices_per_node is not None:
        name = f"{device.devices_per_node} × {device.name}"
        bandwidth = device.network_bandwidth
        network = device.network or (f"{bandwidth * 8 / 1e9:.0f} Gbit/s per device" if bandwidth else None)
        return Node(name, device.name, device.devices_per_node, network, bandwidth)
    for node in nodes():
        if node.device == device.name:
            return node
    return Node(
        name=f"{DEFAULT_DEVICES} × {device.name}",
        device=device.name,
        devices=DEFAULT_DEVICES,
        network=f"{DEFAULT_NETWORK_BANDWIDTH * 8 / 1e9:.0f} Gbit/s per device, assumed",
        network_bandwidth=DEFAULT_NETWORK_BANDWIDTH,
    )


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


# Two levels: devices of a node, and nodes. A ring passes through all devices, node by node; through each border of a
# node flows what flows between two devices, spread over the adapters of all devices of the node that take part. Ring
# and tree as NCCL prices them (its src/graph/tuning.cc; Thakur et al. 2005, "Optimization of Collective Communication
# Operations in MPICH"; for pipelined trees Sanders et al. 2009, "Two-tree algorithms for full bandwidth broadcast").

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]

START_SECONDS = 8.4e-6
LINK_HOP_SECONDS = 3.4e-6
NETWORK_HOP_SECONDS = 14e-6
"""Seconds of a collective's start, of a hop over NVLink, of one over a network: NCCL 2.2x, its protocol for large
messages."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: their number per node, and the number of nodes."""

    per_node: int
    nodes: int = 1

    @property
    def size(self) -> int:
        return self.per_node * self.nodes


@dataclass(frozen=True)
class Interconnect:
    """Bandwidths that collectives reach on two levels, in bytes per second and device, one way."""

    link_bandwidth: float
    network_bandwidth: float
    """Bandwidth between nodes; without a network, the bandwidth of the link."""
    devices_per_node: int
    start_seconds: float = START_SECONDS
    link_hop_seconds: float = LINK_HOP_SECONDS
    network_hop_seconds: float = NETWORK_HOP_SECONDS
    slowdown: float = 0.0
    """Seconds by which a second of communication lengthens the computation that it overlaps with."""
    curves: KernelCurves | None = field(default=None, kw_only=True, repr=False)
    """The curves that collectives within a node follow; None where none were measured."""
    datasheet_link_bandwidth: float = field(default=0.0, kw_only=True, repr=False)
    """The bandwidth of the link by its datasheet, of which the curves take a share."""
    collective_share: float = field(default=1.0, kw_only=True, repr=False)
    """The fraction of their stand-alone speed that collectives reach beside other kernels."""
    datasheet_network_bandwidth: float = field(default=0.0, kw_only=True, repr=False)
    """The bandwidth between nodes by their datasheet, per device; 0.0 where the link is all there is."""
    multiprocessors: int | None = field(default=None, kw_only=True, repr=False)
    """Multiprocessors of a device, some of which collectives may take."""

    def group(self, size: int, *, stride: int = 1) -> Group:
        """The group of `size` ranks of which each is `stride` devices after the one before it.

        >>> Interconnect(450e9, 50e9, 8).group(16, stride=4)
        Group(per_node=2, nodes=8)
        """
        per_node = max(1, min(size, self.devices_per_node // stride))
        return Group(per_node, -(-size // per_node))

    def slower(self, factor: float) -> "Interconnect":
        """These links with all times multiplied by `factor`."""
        if factor == 1:
            return self
        return dataclasses.replace(
            self,
            link_bandwidth=self.link_bandwidth / factor,
            network_bandwidth=self.network_bandwidth / factor,
            start_seconds=factor * self.start_seconds,
            link_hop_seconds=factor * self.link_hop_seconds,
            network_hop_seconds=factor * self.network_hop_seconds,
            datasheet_network_bandwidth=self.datasheet_network_bandwidth / factor,
            collective_share=self.collective_share / factor,
        )

    def seconds(self, operation: Operation, data_bytes: float, group: Group) -> float:
        """Seconds of one collective in which `data_bytes` is the whole tensor: what each rank holds after an
        all-gather, before a reduce-scatter, before and after an all-reduce; what each rank contributes to an
        all-to-all, or sends."""
        if group.size == 1 or not data_bytes:
            return 0.0
        if operation == "send":
            across = group.nodes > 1
            bandwidth = self.network_bandwidth if across else self.link_bandwidth
            return data_bytes / bandwidth + (self.network_hop_seconds if across else self.link_hop_seconds)
        if self.curves is not None and group.nodes == 1:
            alone = self.curves.collective_seconds(operation, data_bytes, group.size, self.datasheet_link_bandwidth)
            return alone / self.collective_share
        if operation == "all_to_all":
            return self._all_to_all(data_bytes, group)
        once = (group.size - 1) / group.size * data_bytes / self.ring_bandwidth(group)
        around = self._ring_hops_seconds(group)
        if operation != "all_reduce":
            return self.start_seconds + once + around
        ring = 2 * (once + around)
        tree = 2 * (data_bytes / self.ring_bandwidth(group) + self._tree_hops_seconds(group))
        return self.start_seconds + min(ring, tree)

    def ring_bandwidth(self, group: Group) -> float:
        """Bytes per second that flow from each rank of a ring to the next, when parallel rings use every adapter."""
        if group.nodes == 1:
            return self.link_bandwidth
        between = group.per_node * self.network_bandwidth
        return between if group.per_node == 1 else min(self.link_bandwidth, between)

    def _ring_hops_seconds(self, group: Group) -> float:
        between = group.nodes - 1 if group.nodes > 1 else 0
        return (group.size - 1 - between) * self.link_hop_seconds + between * self.network_hop_seconds

    def _tree_hops_seconds(self, group: Group) -> float:
        # A chain within each node, a tree of nodes.
        depth = math.ceil(math.log2(group.nodes)) if group.nodes > 1 else 0
        return (group.per_node - 1) * self.link_hop_seconds + depth * self.network_hop_seconds

    def _all_to_all(self, data_bytes: float, group: Group) -> float:
        each = data_bytes / group.size
        within, across = group.per_node - 1, group.size - group.per_node
        seconds = max(within * each / self.link_bandwidth, across * each / self.network_bandwidth)
        return self.start_seconds + seconds + (self.network_hop_seconds if across else self.link_hop_seconds)


def interconnect_of(device: Device, node: Node, efficiency: Efficiency) -> Interconnect | None:
    """The rates that collectives reach among devices in such nodes; None where the datasheet has no bandwidth."""
    # Bridges connect pairs of cards: beyond a pair, all go through the host.
    bridged = device.link is None or "bridge" in device.link
    link = device.host_bandwidth if bridged else device.link_bandwidth
    if link is None:
        return None
    network, share = node.network_bandwidth, efficiency.collective_share
    return Interconnect(
        efficiency.link_share * link,
        _reached(network, efficiency) if network else efficiency.link_share * link,
        node.devices,
        start_seconds=efficiency.hop_factor * START_SECONDS,
        link_hop_seconds=efficiency.hop_factor * LINK_HOP_SECONDS,
        network_hop_seconds=efficiency.hop_factor * NETWORK_HOP_SECONDS,
        slowdown=efficiency.slowdown,
        curves=None if bridged or share is None or "link_share" in device.efficiency else curves_of(device),
        collective_share=share or 1.0,
        datasheet_link_bandwidth=link,
        datasheet_network_bandwidth=network or 0.0,
        multiprocessors=device.multiprocessors,
    )


LINE_SHARE = 0.92
"""The share of a network adapter's rate that is left for data: headers of packets, and what NCCL's tests reach of
100, 200 and 400 Gbit/s (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md has the definition)."""


def _reached(network: float, efficiency: Efficiency) -> float:
    """Bytes per second and device that collectives reach on a network.

    A byte passes through the adapter, and through the device and its node, one after the other: seconds per byte add
    up. `network_share` was fitted to the usual network of a generation; what it takes there beside the adapter, it
    takes on slower and faster networks too.
    """
    usual = efficiency.usual_network
    if usual is None:
        return efficiency.network_share * network
    beside = 1 / (efficiency.network_share * usual) - 1 / (LINE_SHARE * usual)
    return 1 / (1 / (LINE_SHARE * network) + max(0.0, beside))
