"""Accelerators by name: datasheet figures from the catalogue, or from a TOML file of one's own with the same fields.

Data and conventions are in catalogue.toml. A file needs `name`, `peaks`, `memory_bytes` and `memory_bandwidth`.
"""

import dataclasses
import functools
import math
import os
import re
import typing
from pathlib import Path
from typing import Any

import msgspec

from napkin.errors import NapkinError, near_names
from napkin.files import StrPath
from napkin.hardware.ceilings import COEFFICIENTS, Efficiency, efficiency_of
from napkin.hardware.device import Device, PeakFormat, Price, Source
from napkin.toml_files import packaged_toml, read_toml

LARGEST_FILE = 16_384
_FIELDS = [field.name for field in dataclasses.fields(Device)]
_FORMATS = list(typing.get_args(PeakFormat))
_TABLES = {
    "price": [field.name for field in dataclasses.fields(Price)],
    "source": [field.name for field in dataclasses.fields(Source)],
    "peaks": _FORMATS,
    "sparse": _FORMATS,
    "efficiency": [*COEFFICIENTS, "cudnn_attention_share", "fp8_share", "factor"],
}
_REQUIRED = ("name", "peaks", "memory_bytes", "memory_bandwidth")
_LARGEST_FIGURE = 1e24


def is_device_file(name: StrPath) -> bool:
    """True if a name of a device is that of a file which describes one."""
    return isinstance(name, os.PathLike) or name.lower().endswith(".toml")


def read_device(path: StrPath) -> Device:
    """Read a device from a TOML file.

    Raises NapkinError, which names the field and what is expected there, for a file that cannot be read or does not
    describe a device.
    """
    path = Path(path)
    what = "a TOML file that describes a device, or a device of `napkin hardware`"
    values = read_toml(path, what, most_bytes=LARGEST_FILE)
    _refuse_unknown(path, values, _FIELDS)
    for field, names in _TABLES.items():
        if isinstance(values.get(field), dict):
            _refuse_unknown(path, values[field], names, f"{field}.")
    for field in _REQUIRED:
        if field not in values:
            raise NapkinError(f"'{path}': the field {field} is missing: add it, as in `napkin hardware H100 --json`")
    for field in ("memory_bytes", "advertised_bytes"):
        if isinstance(values.get(field), float) and values[field].is_integer():
            values[field] = int(values[field])  # 80e9
    left_out = {"vendor": "", "source": None, "advertised_bytes": values["memory_bytes"]}
    values |= {field: value for field, value in left_out.items() if field not in values}
    try:
        device = msgspec.convert(values, Device)
    except msgspec.ValidationError as error:
        raise _error(path, error) from None
    try:
        msgspec.convert(dataclasses.asdict(efficiency_of(device)), Efficiency)
    except msgspec.ValidationError as error:
        raise _error(path, error, "efficiency.") from None
    _refuse_absurd(path, device)
    return device


def _error(path: Path, error: msgspec.ValidationError, prefix: str = "") -> NapkinError:
    what, _, where = str(error).partition(" - at `$")
    where = prefix + where.rstrip("`").lstrip(".").replace("[...]", " ").strip() or "the file"
    return NapkinError(f"'{path}': {where}: {what[:1].lower()}{what[1:].replace('`', '')}")


def _refuse_unknown(path: Path, values: dict[str, Any], known: list[str], prefix: str = "") -> None:
    for name in values:
        if name not in known:
            near = near_names(name, known)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"use one of {', '.join(known)}"
            raise NapkinError(f"'{path}': unknown field {prefix}{name}: {hint}")


def _refuse_absurd(path: Path, device: Device) -> None:
    """Refuse figures that the types allow, and no device has."""
    if not device.name.strip():
        raise NapkinError(f"'{path}': name: expected a name, got {device.name!r}")
    if not device.peaks:
        raise NapkinError(f"'{path}': peaks: expected at least one format, as in peaks = {{ bf16 = 100e12 }}")
    figures = {
        field.name: getattr(device, field.name)
        for field in dataclasses.fields(Device)
        if isinstance(getattr(device, field.name), int | float)
    }
    figures |= {f"peaks.{name}": rate for name, rate in device.peaks.items()}
    figures |= {f"sparse.{name}": rate for name, rate in device.sparse.items()}
    figures |= {"price.usd_per_hour": device.price.usd_per_hour} if device.price else {}
    for name, figure in figures.items():
        if not math.isfinite(figure) or figure > _LARGEST_FIGURE:
            raise NapkinError(f"'{path}': {name}: expected a number up to {_LARGEST_FIGURE:.0e}, got {figure}")
    if device.usable_bytes <= 0:
        raise NapkinError(
            f"'{path}': memory_bytes: expected more than {device.memory_bytes - device.usable_bytes:,}, which a CUDA "
            f"context takes, got {device.memory_bytes:,}"
        )


# Prefixes that are not part of the name: "NVIDIA GeForce RTX 4090" is the RTX-4090.
_BRANDS = set("nvidia geforce tesla quadro amd instinct google cloud apple intel habana aws gpu".split())


@functools.cache
def catalogue() -> tuple[Device, ...]:
    """All accelerators in the catalogue, in order."""
    return packaged_toml("napkin.hardware", "catalogue.toml", tuple[Device, ...], "device")


def find_device(name: StrPath) -> Device:
    """Find an accelerator by its name in the catalogue, a common short name, or the name that its driver reports.

    A name that ends in ".toml" is that of a file that describes a device.

    Case, "-", "_" and spaces do not matter. A short name means the most common variant: "H100" is the SXM with 80 GB,
    "A100" the SXM with 80 GB, "V100" the SXM2 with 16 GB. Raises NapkinError for an unknown name, and for a file that
    does not describe a device.

    >>> find_device("h100").name, find_device("NVIDIA A100-SXM4-40GB").name
    ('H100-SXM-80GB', 'A100-SXM-40GB')
    """
    if is_device_file(name):
        return read_device(name)
    name = os.fspath(name)
    devices = _devices_by_name()
    plain = _plain(name)
    if plain in devices:
        return devices[plain]
    near = [devices[match].name for match in near_names(plain, devices, n=6)]
    if near:
        raise NapkinError(
            f"{name!r} is not a known accelerator: the closest names are {', '.join(list(dict.fromkeys(near))[:3])}; "
            "a TOML file can describe one of your own"
        )
    everything = ", ".join(device.name for device in catalogue())
    raise NapkinError(f"{name!r} is not a known accelerator: use one of {everything}; or a TOML file that describes it")


@functools.cache
def _devices_by_name() -> dict[str, Device]:
    return {_plain(alias): device for device in catalogue() for alias in (device.name, *device.aliases)}


def _plain(name: str) -> str:
    words = re.split(r"[\s_\-]+", name.lower())
    return "".join(word for word in words if word not in _BRANDS)
