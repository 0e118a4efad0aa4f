"""A file that describes a device as it was measured: its datasheet, and the fractions of it that a calibration reached.

`napkin plan --on 64xFILE` then plans with those coefficients in place of its generation's (`efficiency.toml`). What a
calibration does not measure (attention, links, fusing) stays the generation's.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import psutil

from napkin.errors import NapkinError
from napkin.hardware.calibration import Calibration, MatmulMeasurement
from napkin.hardware.device import Device
from napkin.hardware.device_file import find_device

_THINNEST_SIDE = 256
"""Products with a thinner side are bound by bytes, which a plan prices apart."""
_FIELDS = (
    "vendor compute_capability memory_bytes advertised_bytes memory_bandwidth link link_bandwidth host_link "
    "host_bandwidth watts torch_device"
).split()


def measured_device(calibration: Calibration) -> str:
    """The text of the TOML file of the device that a calibration measured.

    A device of the catalogue keeps its datasheet; of any other, the peaks are what was measured, and its memory this
    machine's. Raises NapkinError for a GPU that is not in the catalogue.
    """
    machine = calibration.machine
    try:
        device = find_device(machine.device_name)
    except NapkinError:
        if machine.device_type != "cpu":
            raise
        device = _this_cpu(calibration)
    values: dict[str, Any] = {"name": f"{device.name}, measured", "peaks": dict(device.peaks)}
    values |= {name: getattr(device, name) for name in _FIELDS if getattr(device, name) is not None}
    values["efficiency"] = measured_efficiency(calibration, device)
    measured = f"# {machine.device_name}, measured by napkin {calibration.measured_at}, torch {machine.torch_version}"
    return "\n".join([measured, *(f"{name} = {_toml(value)}" for name, value in values.items())]) + "\n"


def measured_efficiency(calibration: Calibration, device: Device) -> dict[str, float]:
    """The coefficients of `napkin.hardware.ceilings.Efficiency` that a calibration measured on a device."""
    name = "bf16" if "bf16" in calibration.formats else calibration.formats[0]
    measured = [matmul for matmul in calibration.matmuls if matmul.format == name]
    share, width = _share_and_width(measured, device.peak(name))
    return {
        "matmul_share": _rounded(share),
        "matmul_width": _rounded(width),
        "memory_share": _rounded(calibration.memory_bandwidth / device.memory_bandwidth),
        "kernel_seconds": _rounded(calibration.seconds_per_operator),
    }


def _share_and_width(matmuls: Sequence[MatmulMeasurement], peak: float) -> tuple[float, float]:
    """Fit (1 + width · (1/m + 1/n + 1/k)) / (share · peak) seconds per FLOP by least squares of relative errors."""
    thick = [each for each in matmuls if min(each.m, each.n, each.k) >= _THINNEST_SIDE] or list(matmuls)
    sides = np.array([1 / each.m + 1 / each.n + 1 / each.k for each in thick])
    rates = np.array([each.flops_per_second for each in thick])
    terms = np.stack([rates, rates * sides], axis=1)
    (whole, per_side), *_ = np.linalg.lstsq(terms, np.ones(len(thick)), rcond=None)
    if whole <= 0 or per_side < 0 or len(thick) < 2:
        return float(rates.max()) / peak, 0.0
    return float(1 / whole / peak), float(per_side / whole)


def _this_cpu(calibration: Calibration) -> Device:
    memory = psutil.virtual_memory().total
    return Device(
        name=calibration.machine.device_name,
        vendor="",
        source=None,
        peaks={name: calibration.matmul_peak(name) for name in calibration.formats},  # pyright: ignore[reportArgumentType]
        memory_bytes=memory,
        advertised_bytes=memory,
        memory_bandwidth=calibration.memory_bandwidth,
        torch_device="cpu",
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + " }"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # Basic strings of TOML escape as JSON does.
    return json.dumps(value) if isinstance(value, str) else repr(value)
