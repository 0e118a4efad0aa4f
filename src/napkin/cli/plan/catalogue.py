"""`napkin hardware` and `napkin formats`: the catalogues of accelerators and of number formats."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.errors import NapkinError
from napkin.hardware.cluster import node_of
from napkin.hardware.device import Device
from napkin.hardware.device_file import catalogue, find_device
from napkin.number_formats import FORMATS, bit_fields, round_to
from napkin.units import format_bytes, format_gibibytes, format_rate


@dataclass(frozen=True)
class HardwareOptions(JsonOption):
    """Print the catalogue of accelerators, or everything known about one. A TOML file with the same fields describes a
    device of one's own; every command that takes a device takes its name."""

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """H100, A100-80GB, ..., the name that the driver prints ("NVIDIA H100 80GB HBM3"), or a file: mydevice.toml."""


@command("hardware", HardwareOptions)
def hardware_command(options: HardwareOptions) -> None:
    devices = catalogue() if options.name is None else (find_device(options.name),)
    if options.json:
        print_json([{**asdict(device), "turning_points": device.turning_points} for device in devices])
        return
    if options.name is not None:
        print_table((), _facts(devices[0]))
        return
    rows = [
        (
            device.name,
            *(format_rate(device.peaks[name]) if name in device.peaks else "–" for name in ("bf16", "fp32")),
            format_gibibytes(device.memory_bytes),
            f"{format_bytes(device.memory_bandwidth)}/s",
            f"{device.watts:.0f}" if device.watts else "–",
            f"{device.price.usd_per_hour:.2f}" if device.price else "–",
        )
        for device in devices
    ]
    print_table(("device", "bf16 dense", "fp32", "memory", "bandwidth", "W", "$/h"), rows)
    say("peaks are dense; `napkin hardware NAME` adds the sparse ones, links, sources and the date of the price")


def _facts(device: Device) -> Iterator[tuple[str, str]]:
    yield "device", f"{device.vendor} {device.name}".strip()
    for name, rate in device.peaks.items():
        sparse = f"  (2:4 sparse: {format_rate(device.sparse[name])})" if name in device.sparse else ""
        yield f"{name} dense", format_rate(rate) + sparse
    yield "memory", f"{format_gibibytes(device.memory_bytes)} = {format_bytes(device.memory_bytes)}"
    yield "bandwidth", f"{format_bytes(device.memory_bandwidth)}/s"
    points = ", ".join(f"{name} {point:,.3g}" for name, point in device.turning_points.items())
    yield "FLOP per byte", f"{points}: with fewer, memory is the limit"
    for link, bandwidth in ((device.link, device.link_bandwidth), (device.host_link, device.host_bandwidth)):
        if link and bandwidth:
            yield link, f"{format_bytes(bandwidth)}/s one way"
    node = node_of(device)
    if node.source is not None:
        yield "node", f"{node.name}: {node.devices:,} devices, {node.network or 'no network beyond it'}"
    if device.watts:
        yield "board power", f"{device.watts:.0f} W"
    if device.price:
        yield "typical price", str(device.price)
    yield "also called", ", ".join(device.aliases) or "–"
    yield "source", str(device.source or "–")


@dataclass(frozen=True)
class FormatsOptions(JsonOption):
    """Print the number formats; or VALUE rounded to each of them (write `-- -1.5` for a negative one)."""

    value: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="VALUE")] = None
    """A number to round to each format, for example 1e-8."""


@command("formats", FormatsOptions)
def formats_command(options: FormatsOptions) -> None:
    if options.value is None:
        _print_formats(options.json)
        return
    try:
        value = float(options.value)
    except ValueError:
        raise NapkinError(
            f"'{options.value}' is not a number: give one, as in `napkin formats 1e-8`, or none for the table of all "
            "formats"
        ) from None
    rounded = {
        name: round_to(value, number) for name, number in FORMATS.items() if number.has_nan or not math.isnan(value)
    }
    if options.json:
        print_json({name: asdict(each) for name, each in rounded.items()})
        return
    rows = []
    for name, each in rounded.items():
        verdict = "underflow" if each.underflow else "overflow" if each.overflow else ""
        rows.append((name, f"{each.value:.9g}", f"{each.relative_error:.3g}", verdict, bit_fields(each.bits, name)))
    print_table(("format", "value", "relative error", "", "sign exponent fraction"), rows, align="lrrll")


def _print_formats(as_json: bool) -> None:
    limits = ("largest", "smallest_normal", "smallest_subnormal", "resolution")
    if as_json:
        names = ("bits", "bytes", "sign_bits", "exponent_bits", "fraction_bits", *limits)
        print_json({name: {each: getattr(number, each) for each in names} for name, number in FORMATS.items()})
        return
    rows = []
    for name, number in FORMATS.items():
        fields = f"{number.sign_bits}+{number.exponent_bits}+{number.fraction_bits}"
        rows.append((name, str(number.bits), fields, *(f"{getattr(number, limit):.5g}" for limit in limits)))
    print_table(("format", "bits", "s+e+f", "largest", "normal from", "subnormal from", "resolution"), rows)
