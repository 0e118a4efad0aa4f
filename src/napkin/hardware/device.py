"""One accelerator, as a datasheet describes it."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from napkin.errors import NapkinError
from napkin.number_formats import find_format

PeakFormat = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8", "int4"]
Positive = Annotated[float, msgspec.Meta(gt=0)]

CONTEXT_BYTES = 600_000_000
"""Approximate memory of a CUDA context and its libraries: half a gigabyte on an H100, by nvidia-smi."""


@dataclass(frozen=True)
class Price:
    """A typical hourly price of one device: dollars, the month, and the provider's offer."""

    usd_per_hour: Positive
    date: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d{2}$")]
    offer: str

    def __str__(self) -> str:
        return f"${self.usd_per_hour:.2f} per hour, {self.offer}, {self.date}"


@dataclass(frozen=True)
class Source:
    """A publication with figures: a title, the year (and month) of its publication, and an address."""

    title: Annotated[str, msgspec.Meta(min_length=1)]
    date: Annotated[str, msgspec.Meta(pattern=r"^\d{4}(-\d{2})?$")]
    url: Annotated[str, msgspec.Meta(pattern=r"^https://\S+$")]

    def __str__(self) -> str:
        return f"{self.title}, {self.date}: {self.url}"


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
    source: Source | None
    """Publication with the figures; None only for a device that a file describes without one."""
    peaks: dict[PeakFormat, Positive] = field(hash=False)
    memory_bytes: Annotated[int, msgspec.Meta(gt=0)]
    advertised_bytes: Annotated[int, msgspec.Meta(gt=0)]
    memory_bandwidth: Positive
    sparse: dict[PeakFormat, Positive] = field(default_factory=dict, hash=False)
    compute_capability: tuple[int, int] | None = None
    multiprocessors: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Number of multiprocessors; each computes one tile of a product at a time."""
    cache_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """The last cache before memory, which all multiprocessors share."""
    aliases: tuple[str, ...] = ()
    link: str | None = None
    link_bandwidth: Positive | None = None
    host_link: str | None = None
    host_bandwidth: Positive | None = None
    devices_per_node: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Devices that the link connects; with the network between such nodes only in a file that describes a device: those
    of the catalogue are in nodes.toml."""
    network: str | None = None
    network_bandwidth: Positive | None = None
    watts: Positive | None = None
    price: Price | None = None
    efficiency: dict[str, float] = field(default_factory=dict, hash=False)
    """Coefficients of `napkin.hardware.ceilings` that were measured on it, in place of its generation's; only in a
    file that describes a device."""
    torch_device: Literal["cpu", "cuda"] = "cuda"
    """PyTorch's name of its kind of device; accelerators are counted as "cuda"."""

    @property
    def usable_bytes(self) -> int:
        """The part of `memory_bytes` that remains for tensors after loading a CUDA context and its libraries."""
        return self.memory_bytes - (CONTEXT_BYTES if self.torch_device == "cuda" else 0)

    @property
    def turning_points(self) -> dict[PeakFormat, float]:
        """The arithmetic intensity at which products and memory take equally long, in FLOP per byte of each format: the
        corner of the roofline (Williams, Waterman and Patterson 2009)."""
        return {name: peak / self.memory_bandwidth for name, peak in self.peaks.items()}

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
