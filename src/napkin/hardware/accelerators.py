"""The catalogue of accelerators: datasheet figures by name. Data and conventions are in catalogue.toml.

A device that is not in it is described by a TOML file with the same fields (see `napkin.hardware.device_file`).
"""

import functools
import os
import re
import tomllib
from importlib import resources

import msgspec

from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.hardware.device import Device
from napkin.hardware.device_file import is_device_file, read_device
from napkin.near_names import near_names

# Prefixes that are not part of the name: "NVIDIA GeForce RTX 4090" is the RTX-4090.
_BRANDS = set("nvidia geforce tesla quadro amd instinct google cloud apple intel habana aws gpu".split())


@functools.cache
def catalogue() -> tuple[Device, ...]:
    """All accelerators in the catalogue, in order."""
    text = resources.files("napkin.hardware").joinpath("catalogue.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text)["device"], tuple[Device, ...])


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
