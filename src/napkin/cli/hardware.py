"""`napkin hardware`."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.table import Table

from napkin.cli.options import Switch, parse
from napkin.cli.terminal import out, print_json
from napkin.hardware.catalogue import Device, catalogue, find_device
from napkin.units import format_bytes, format_gibibytes, format_rate


@dataclass(frozen=True)
class HardwareOptions:
    """Print the catalogue of accelerators, or all that is known of one."""

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """H100, A100-80GB, ..., or the name that the driver prints: "NVIDIA H100 80GB HBM3"."""
    json: Switch = False
    """Print the result for programs."""


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
    table = Table("device", "bf16 dense", "fp32", "memory", "bandwidth", "W", "$/h", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for device in devices:
        rates = [format_rate(device.peaks[name]) if name in device.peaks else "–" for name in ("bf16", "fp32")]
        table.add_row(
            device.name,
            *rates,
            format_gibibytes(device.memory_bytes),
            format_bytes(device.memory_bandwidth) + "/s",
            f"{device.watts:.0f}" if device.watts else "–",
            f"{device.price.usd_per_hour:.2f}" if device.price else "–",
        )
    out.print(table)
    out.print("peaks are dense; `napkin hardware NAME` adds the sparse ones, links, sources and the date of the price")


def _print_one(device: Device) -> None:
    rows = [("device", f"{device.vendor} {device.name}")]
    for name, rate in device.peaks.items():
        sparse = f"  (2:4 sparse: {format_rate(device.sparse[name])})" if name in device.sparse else ""
        rows.append((f"{name} dense", format_rate(rate) + sparse))
    rows.append(("memory", f"{format_gibibytes(device.memory_bytes)} = {format_bytes(device.memory_bytes)}"))
    rows.append(("bandwidth", f"{format_bytes(device.memory_bandwidth)}/s"))
    for link, bandwidth in ((device.link, device.link_bandwidth), (device.host_link, device.host_bandwidth)):
        if link and bandwidth:
            rows.append((link, f"{format_bytes(bandwidth)}/s one way"))
    if device.watts:
        rows.append(("board power", f"{device.watts:.0f} W"))
    if device.price:
        rows.append(
            ("typical price", f"${device.price.usd_per_hour:.2f} an hour, {device.price.date}: {device.price.offer}")
        )
    rows.append(("also called", ", ".join(device.aliases) or "–"))
    rows.append(("source", device.source))
    table = Table(box=None, show_header=False)
    for row in rows:
        table.add_row(*row)
    out.print(table)
