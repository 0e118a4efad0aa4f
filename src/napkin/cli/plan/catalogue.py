"""`napkin hardware` and `napkin formats`: the catalogues of accelerators and of number formats."""

import dataclasses
import math
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.errors import NapkinError
from napkin.hardware.cluster import node_of
from napkin.hardware.device import Device
from napkin.hardware.device_file import catalogue, find_device
from napkin.number_formats import FORMATS, NumberFormat, Rounded, bit_fields, round_to
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


@dataclass(frozen=True)
class FormatsOptions(JsonOption):
    """Print the number formats; or VALUE rounded to each of them (write `-- -1.5` for a negative one)."""

    value: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="VALUE")] = None
    """A number to round to each format, for example 1e-8."""


@command("formats", FormatsOptions)
def formats_command(options: FormatsOptions) -> None:
    if options.value is None:
        _print_formats(options.json)
    else:
        _print_value(_number(options.value), options.json)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise NapkinError(
            f"'{text}' is not a number: give one, as in `napkin formats 1e-8`, or none for the table of all formats"
        ) from None


def _print_formats(as_json: bool) -> None:
    if as_json:
        print_json({name: _describe(number) for name, number in FORMATS.items()})
        return
    headings = ("format", "bits", "s+e+f", "largest", "normal from", "subnormal from", "resolution")
    rows = []
    for name, number in FORMATS.items():
        fields = f"{number.sign_bits}+{number.exponent_bits}+{number.fraction_bits}"
        figures = (number.largest, number.smallest_normal, number.smallest_subnormal, number.resolution)
        rows.append((name, str(number.bits), fields, *(f"{figure:.5g}" for figure in figures)))
    print_table(headings, rows)


def _print_value(value: float, as_json: bool) -> None:
    formats = {name: number for name, number in FORMATS.items() if number.has_nan or not math.isnan(value)}
    rounded = {name: round_to(value, number) for name, number in formats.items()}
    if as_json:
        print_json({name: asdict(each) for name, each in rounded.items()})
        return
    rows = [
        (name, f"{each.value:.9g}", f"{each.relative_error:.3g}", _verdict(each), bit_fields(each.bits, name))
        for name, each in rounded.items()
    ]
    print_table(("format", "value", "relative error", "", "sign exponent fraction"), rows, align="lrrll")


def _verdict(rounded: Rounded) -> str:
    return "underflow" if rounded.underflow else "overflow" if rounded.overflow else ""


def _describe(number: NumberFormat) -> dict[str, float | int]:
    return {
        "bits": number.bits,
        "bytes": number.bytes,
        "sign_bits": number.sign_bits,
        "exponent_bits": number.exponent_bits,
        "fraction_bits": number.fraction_bits,
        "largest": number.largest,
        "smallest_normal": number.smallest_normal,
        "smallest_subnormal": number.smallest_subnormal,
        "resolution": number.resolution,
    }
