"""The catalogue of accelerators: datasheet figures by name. Data and conventions are in catalogue.toml."""

import difflib
import functools
import re
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from typing import Annotated, Literal

import msgspec

from napkin.errors import NapkinError
from napkin.number_formats import find_format

PeakFormat = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4"]
Positive = Annotated[float, msgspec.Meta(gt=0)]

# Prefixes that are not part of the name: "NVIDIA GeForce RTX 4090" is the RTX-4090.
_BRANDS = {"nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "google", "cloud", "apple", "gpu"}


CONTEXT_BYTES = 600_000_000
"""Approximate memory of a CUDA context and its libraries: half a gigabyte on an H100, by nvidia-smi."""


@dataclass(frozen=True)
class Price:
    """A typical hourly price of one device: dollars, the month, and the provider's offer."""

    usd_per_hour: Positive
    date: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d{2}$")]
    offer: str


@dataclass(frozen=True)
class Device:
    """One accelerator: FLOP/s of dense matrix products by format, bytes, bytes/s, watts of the board, dollars.

    `memory_bytes` is the total that the driver reports, `advertised_bytes` the round figure of the datasheet. `sparse`
    has the advertised figures for 2:4 structured sparsity, which are not used in any computation. Link bandwidths are
    per direction, half of the sum that datasheets state. None means that the vendor states no figure, or that there is
    no such link or offer.
    """

    name: str
    vendor: str
    source: Annotated[str, msgspec.Meta(min_length=1)]
    peaks: dict[PeakFormat, Positive] = field(hash=False)
    memory_bytes: Annotated[int, msgspec.Meta(gt=0)]
    advertised_bytes: Annotated[int, msgspec.Meta(gt=0)]
    memory_bandwidth: Positive
    sparse: dict[PeakFormat, Positive] = field(default_factory=dict, hash=False)
    compute_capability: tuple[int, int] | None = None
    aliases: tuple[str, ...] = ()
    link: str | None = None
    link_bandwidth: Positive | None = None
    host_link: str | None = None
    host_bandwidth: Positive | None = None
    watts: Positive | None = None
    price: Price | None = None
    torch_device: Literal["cpu", "cuda"] = "cuda"
    """What PyTorch calls its kind of device; accelerators are counted as "cuda"."""

    @property
    def usable_bytes(self) -> int:
        """The part of `memory_bytes` that remains for tensors after loading a CUDA context and its libraries."""
        return self.memory_bytes - (CONTEXT_BYTES if self.torch_device == "cuda" else 0)

    def choose_format(self, wanted: Literal["auto", "bf16", "fp32"]) -> Literal["bf16", "fp32"]:
        """The format of matrix products: "auto" is bf16 if the device supports it, otherwise fp32.

        Raises NapkinError for a format that the device does not support.
        """
        if wanted == "auto":
            return "bf16" if "bf16" in self.peaks else "fp32"
        self.peak(wanted)
        return wanted

    def peak(self, format_name: str) -> float:
        """Dense FLOP/s in a number format, given by any of its names; both fp8 formats have the same rate.

        Raises NapkinError if the device does not support the format, or the name is not a format.
        """
        name = find_format(format_name).name
        key = "fp8" if name.startswith("fp8") else name
        for known, flops_per_second in self.peaks.items():
            if known == key:
                return flops_per_second
        raise NapkinError(f"{self.name} does not support {key} arithmetic: choose one of {', '.join(self.peaks)}")


@functools.cache
def catalogue() -> tuple[Device, ...]:
    """All accelerators in the catalogue, in order."""
    text = resources.files("napkin.hardware").joinpath("catalogue.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text)["device"], tuple[Device, ...])


def find_device(name: str) -> Device:
    """Find an accelerator by its name in the catalogue, a common short name, or the name that its driver reports.

    Case, "-", "_" and spaces do not matter. A short name means the most common variant: "H100" is the SXM with 80 GB,
    "A100" the SXM with 80 GB, "V100" the SXM2 with 16 GB. Raises NapkinError for an unknown name.

    >>> find_device("h100").name, find_device("NVIDIA A100-SXM4-40GB").name
    ('H100-SXM-80GB', 'A100-SXM-40GB')
    """
    devices = _devices_by_name()
    plain = _plain(name)
    if plain in devices:
        return devices[plain]
    near = [devices[match].name for match in difflib.get_close_matches(plain, devices, n=6)]
    if near:
        raise NapkinError(
            f"{name!r} is not a known accelerator: the closest names are {', '.join(list(dict.fromkeys(near))[:3])}"
        )
    everything = ", ".join(device.name for device in catalogue())
    raise NapkinError(f"{name!r} is not a known accelerator: use one of {everything}")


@functools.cache
def _devices_by_name() -> dict[str, Device]:
    return {_plain(alias): device for device in catalogue() for alias in (device.name, *device.aliases)}


def _plain(name: str) -> str:
    words = re.split(r"[\s_\-]+", name.lower())
    return "".join(word for word in words if word not in _BRANDS)
