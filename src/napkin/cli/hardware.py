"""`napkin hardware`."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import tyro

from napkin.cli.options import JsonOption, parse
from napkin.cli.terminal import print_json, print_table, say
from napkin.hardware.cluster import node_of
from napkin.hardware.device import Device
from napkin.hardware.device_file import catalogue, find_device
from napkin.units import format_bytes, format_gibibytes, format_rate


@dataclass(frozen=True)
class HardwareOptions(JsonOption):
    """Print the catalogue of accelerators, or everything known about one. A TOML file with the same fields describes a
    device of one's own; every command that takes a device takes its name."""

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """H100, A100-80GB, ..., the name that the driver prints ("NVIDIA H100 80GB HBM3"), or a file: mydevice.toml."""


def main(arguments: list[str]) -> None:
    """Print the catalogue, or one device of it."""
    options = parse(HardwareOptions, "hardware", arguments)
    devices = catalogue() if options.name is None else (find_device(options.name),)
    if options.json:
        print_json([dataclasses.asdict(device) for device in devices])
    elif options.name is None:
        _print_all(devices)
    else:
        _print_one(devices[0])


def _print_all(devices: tuple[Device, ...]) -> None:
    rows = []
    for device in devices:
        rates = [format_rate(device.peaks[name]) if name in device.peaks else "–" for name in ("bf16", "fp32")]
        watts = f"{device.watts:.0f}" if device.watts else "–"
        price = f"{device.price.usd_per_hour:.2f}" if device.price else "–"
        bandwidth = f"{format_bytes(device.memory_bandwidth)}/s"
        rows.append((device.name, *rates, format_gibibytes(device.memory_bytes), bandwidth, watts, price))
    print_table(("device", "bf16 dense", "fp32", "memory", "bandwidth", "W", "$/h"), rows)
    say("peaks are dense; `napkin hardware NAME` adds the sparse ones, links, sources and the date of the price")


def _print_one(device: Device) -> None:
    rows = [("device", f"{device.vendor} {device.name}".strip())]
    for name, rate in device.peaks.items():
        sparse = f"  (2:4 sparse: {format_rate(device.sparse[name])})" if name in device.sparse else ""
        rows.append((f"{name} dense", format_rate(rate) + sparse))
    rows.append(("memory", f"{format_gibibytes(device.memory_bytes)} = {format_bytes(device.memory_bytes)}"))
    rows.append(("bandwidth", f"{format_bytes(device.memory_bandwidth)}/s"))
    for link, bandwidth in ((device.link, device.link_bandwidth), (device.host_link, device.host_bandwidth)):
        if link and bandwidth:
            rows.append((link, f"{format_bytes(bandwidth)}/s one way"))
    node = node_of(device)
    if node.source is not None:
        rows.append(("node", f"{node.name}: {node.devices:,} devices, {node.network or 'no network beyond it'}"))
    if device.watts:
        rows.append(("board power", f"{device.watts:.0f} W"))
    if device.price:
        rows.append(("typical price", str(device.price)))
    rows.append(("also called", ", ".join(device.aliases) or "–"))
    rows.append(("source", str(device.source or "–")))
    print_table((), rows)
