"""The seconds of collectives by the α–β model: a latency for each hop, and bytes over a bandwidth.

Two levels: devices of a node, and nodes. A ring passes through all devices, node by node; through each border of a node
flows what flows between two devices, spread over the adapters of all devices of the node that take part. Ring and tree
as NCCL prices them (its src/graph/tuning.cc; Thakur et al. 2005, "Optimization of Collective Communication Operations
in MPICH"; for pipelined trees Sanders et al. 2009, "Two-tree algorithms for full bandwidth broadcast").
"""

import math
from dataclasses import dataclass
from typing import Literal

from napkin.hardware.device import Device
from napkin.hardware.efficiency import Efficiency
from napkin.hardware.node import Node

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]

START_SECONDS = 8.4e-6
LINK_HOP_SECONDS = 3.4e-6
NETWORK_HOP_SECONDS = 14e-6
"""Of a collective's start, of a hop over NVLink, of one over a network: NCCL 2.2x, its protocol for large messages."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: so many in each of so many nodes."""

    per_node: int
    nodes: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.per_node * self.nodes


@dataclass(frozen=True)
class Interconnect:
    """Bandwidths that collectives reach on two levels, in bytes per second and device, one way."""

    link_bandwidth: float
    network_bandwidth: float
    """Between nodes; the link's where the link is all there is."""
    devices_per_node: int
    start_seconds: float = START_SECONDS
    link_hop_seconds: float = LINK_HOP_SECONDS
    network_hop_seconds: float = NETWORK_HOP_SECONDS
    slowdown: float = 0.0
    """Seconds by which a second of communication lengthens the computation that it overlaps with."""

    def group(self, size: int, *, stride: int = 1) -> Group:
        """The group of `size` ranks of which each is `stride` devices after the one before it.

        >>> Interconnect(450e9, 50e9, 8).group(16, stride=4)
        Group(per_node=2, nodes=8)
        """
        per_node = max(1, min(size, self.devices_per_node // stride))
        return Group(per_node, -(-size // per_node))

    def seconds(self, operation: Operation, data_bytes: float, group: Group) -> float:
        """Seconds of one collective in which `data_bytes` is the whole tensor: what each rank has after an all-gather,
        before a reduce-scatter, before and after an all-reduce; what each rank gives to an all-to-all, or sends."""
        if group.size == 1 or not data_bytes:
            return 0.0
        if operation == "send":
            across = group.nodes > 1
            bandwidth = self.network_bandwidth if across else self.link_bandwidth
            return data_bytes / bandwidth + (self.network_hop_seconds if across else self.link_hop_seconds)
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
    """What collectives reach among devices in such nodes; None where the datasheet has no bandwidth."""
    # Bridges connect pairs of cards: beyond a pair, all go through the host.
    bridged = device.link is None or "bridge" in device.link
    link = device.host_bandwidth if bridged else device.link_bandwidth
    if link is None:
        return None
    network = node.network_bandwidth
    return Interconnect(
        efficiency.link_share * link,
        efficiency.network_share * network if network else efficiency.link_share * link,
        node.devices,
        start_seconds=efficiency.hop_factor * START_SECONDS,
        link_hop_seconds=efficiency.hop_factor * LINK_HOP_SECONDS,
        network_hop_seconds=efficiency.hop_factor * NETWORK_HOP_SECONDS,
        slowdown=efficiency.slowdown,
    )
