"""The catalogue of accelerators: what vendors promise, by name; figures and conventions in catalogue.toml."""

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

# What drivers and people put before the name proper: "NVIDIA GeForce RTX 4090" is the RTX-4090.
_BRANDS = {"nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "google", "cloud", "apple", "gpu"}


CONTEXT_BYTES = 600_000_000
"""A CUDA context and its libraries, about: half a gigabyte on an H100, by nvidia-smi."""


@dataclass(frozen=True)
class Price:
    """A typical hourly price of one device: dollars, the month it was asked, and whose offer it was."""

    usd_per_hour: Positive
    date: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d{2}$")]
    offer: str


@dataclass(frozen=True)
class Device:
    """One accelerator: FLOP/s of dense matrix products by format, bytes, bytes/s, watts of the board, dollars.

    `memory_bytes` is what the driver reports in all, `advertised_bytes` the round figure of the datasheet. `sparse`
    holds the 2:4 structured-sparsity figures that vendors advertise; nothing is computed from them. Link bandwidths are
    one way, half of what datasheets add up. None means that the vendor states no figure or that there is no such link
    or offer.
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
        """What is left of `memory_bytes` for tensors once a CUDA context and its libraries are loaded."""
        return self.memory_bytes - (CONTEXT_BYTES if self.torch_device == "cuda" else 0)

    def choose_format(self, wanted: Literal["auto", "bf16", "fp32"]) -> Literal["bf16", "fp32"]:
        """The format of matrix products: "auto" is bf16 where the device has it, else fp32.

        Raises NapkinError for one that the device lacks.
        """
        if wanted == "auto":
            return "bf16" if "bf16" in self.peaks else "fp32"
        self.peak(wanted)
        return wanted

    def peak(self, format_name: str) -> float:
        """Dense FLOP/s in a number format, given by any of its names; both fp8 formats run at one rate.

        Raises NapkinError where the device has no such arithmetic, or the name is no format.
        """
        name = find_format(format_name).name
        key = "fp8" if name.startswith("fp8") else name
        for known, flops_per_second in self.peaks.items():
            if known == key:
                return flops_per_second
        raise NapkinError(f"{self.name} has no arithmetic in {key}: choose one of {', '.join(self.peaks)}")


@functools.cache
def catalogue() -> tuple[Device, ...]:
    """All accelerators of the catalogue, in its order."""
    text = resources.files("napkin.hardware").joinpath("catalogue.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text)["device"], tuple[Device, ...])


def find_device(name: str) -> Device:
    """The accelerator of that name: the catalogue's, a usual short one, or the one its driver prints.

    Upper and lower case, "-", "_" and spaces are alike. A short name means the commonest form: "H100" the SXM
    with 80 GB, "A100" the SXM with 80 GB, "V100" the SXM2 with 16 GB. Raises NapkinError for an unknown name.

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
            f"{name!r} is no accelerator napkin knows: the nearest are {', '.join(list(dict.fromkeys(near))[:3])}"
        )
    everything = ", ".join(device.name for device in catalogue())
    raise NapkinError(f"{name!r} is no accelerator napkin knows: use one of {everything}")


@functools.cache
def _devices_by_name() -> dict[str, Device]:
    return {_plain(alias): device for device in catalogue() for alias in (device.name, *device.aliases)}


def _plain(name: str) -> str:
    words = re.split(r"[\s_\-]+", name.lower())
    return "".join(word for word in words if word not in _BRANDS)
