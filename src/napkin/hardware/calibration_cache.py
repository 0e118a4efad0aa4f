"""Calibrating this machine, and the cache of what was measured: one JSON file per machine.

A file that is malformed or is for another machine is ignored: the machine is measured again and the file replaced.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

from napkin.errors import NapkinError
from napkin.hardware.calibration import CUDA_SETTINGS, Calibration, CalibrationSettings, Machine, better_of, comparable
from napkin.json_files import cache_path, read_cached, write_cached


def calibration_of_this_machine(
    device_type: str = "cpu",
    *,
    again: bool = False,
    settings: CalibrationSettings | None = None,
    progress: Callable[[float], None] | None = None,
) -> Calibration:
    """The cached calibration of this machine, or a new one, which takes some seconds and is cached.

    A calibration that other processes disturbed is measured again by the first process that starts when they have gone.
    `again` measures in any case, and keeps the better of both measurements. `settings` and `progress` are those of
    `calibrate`. Raises NapkinError for a device that is not available, and warns if the cache cannot be written.
    """
    # Imports torch.
    from napkin.hardware.competition import is_quiet_start

    cached = load_calibration(device_type)
    if cached is not None and not again and not (cached.disturbed and is_quiet_start(device_type)):
        return cached
    measured = calibrate(device_type, settings=settings, progress=progress)
    if cached is not None and comparable(cached, measured):
        measured = better_of(cached, measured)
    try:
        save_calibration(measured)
    except (OSError, NapkinError) as error:
        warnings.warn(f"the calibration cannot be cached and will be measured again: {error}", stacklevel=2)
    return measured


def calibrate(
    device_type: str = "cpu",
    *,
    settings: CalibrationSettings | None = None,
    progress: Callable[[float], None] | None = None,
) -> Calibration:
    """Measure this machine in about `settings.seconds`; `progress` is called with the fraction done, 0 to 1.

    Uses torch's number of threads. Raises NapkinError for a device that is not available.
    """
    # Imports torch.
    from napkin.hardware.microbenchmarks import measure

    settings = settings or (CUDA_SETTINGS if device_type == "cuda" else CalibrationSettings())
    return measure(device_type, settings, progress or (lambda _: None))


def load_calibration(device_type: str = "cpu") -> Calibration | None:
    """The cached calibration that is valid for this machine as it is now; None if there is none."""
    from napkin.hardware.microbenchmarks import current_machine

    machine = current_machine(device_type)
    cached = read_cached(calibration_path(machine), Calibration)
    return cached if cached is not None and cached.machine == machine else None


def save_calibration(calibration: Calibration) -> Path:
    """Cache a calibration, replacing an older one of the same machine; returns the file."""
    path = calibration_path(calibration.machine)
    write_cached(path, calibration)
    return path


def calibration_path(machine: Machine) -> Path:
    return cache_path("calibration", machine)
