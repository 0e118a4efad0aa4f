"""Nodes: how many devices one fast link connects, and what connects such nodes. Data are in nodes.toml."""

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Annotated

import msgspec

from napkin.hardware.device import Device, Positive, Source

DEFAULT_DEVICES = 8
"""Per node, of a device that no node of the table has."""
DEFAULT_NETWORK_BANDWIDTH = 25e9
"""Bytes per second and device, one way, between such nodes: 200 Gbit/s for each device."""


@dataclass(frozen=True)
class Node:
    """Devices that one fast link connects: a server, a rack or a pod."""

    name: str
    device: str
    """Its devices' name in the catalogue."""
    devices: Annotated[int, msgspec.Meta(gt=0)]
    network: str | None = None
    """What connects nodes; None where the fast link is all there is."""
    network_bandwidth: Positive | None = None
    """Bytes per second between nodes, per device and one way."""
    source: Source | None = None
    """Where the figures stand; None for a node that was assumed."""


@functools.cache
def nodes() -> tuple[Node, ...]:
    """All nodes of the table, in order."""
    text = resources.files("napkin.hardware").joinpath("nodes.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text)["node"], tuple[Node, ...])


def node_of(device: Device) -> Node:
    """The node that a device is assumed to be in: the one that its file describes, else the first that the table has,
    else `DEFAULT_DEVICES` of them.

    >>> from napkin.hardware.accelerators import find_device
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
