"""Calibrations kept between runs: one JSON file a machine, in the user's cache.

The folder is NAPKIN_CACHE_DIR where that is set, else the system's place for caches. A file that is malformed or
holds for another machine is as good as none: the machine is measured again and the file replaced.
"""

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec

from napkin.errors import NapkinError
from napkin.files import atomic_write_text, cache_folder
from napkin.hardware.calibration import Calibration, CalibrationSettings, Machine, calibrate, faster_of, measured_alike


def calibration_of_this_machine(
    device_type: str = "cpu",
    *,
    again: bool = False,
    settings: CalibrationSettings | None = None,
    progress: Callable[[float], None] | None = None,
) -> Calibration:
    """The kept calibration of this machine, or a new one, which takes some seconds and is kept.

    `again` measures in any case and keeps the faster of both figures: the remedy for a calibration that is
    `disturbed`, made while other programs held the processor. `settings` and `progress` are those of `calibrate`,
    used only if there is something to measure. Raises NapkinError for a device that is not there and warns where
    the cache cannot be written.
    """
    kept = load_calibration(device_type)
    if kept is not None and not again:
        return kept
    measured = calibrate(device_type, settings=settings, progress=progress)
    if kept is not None and measured_alike(kept, measured):
        measured = faster_of(kept, measured)
    try:
        save_calibration(measured)
    except (OSError, NapkinError) as error:
        warnings.warn(f"the calibration is not kept and will be measured again: {error}", stacklevel=2)
    return measured


def load_calibration(device_type: str = "cpu") -> Calibration | None:
    """The kept calibration that holds for this machine as it is now, None where there is no such file."""
    from napkin.hardware.probes import this_machine

    machine = this_machine(device_type)
    try:
        kept = msgspec.json.decode(calibration_path(machine).read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return kept if kept.machine == machine else None


def save_calibration(calibration: Calibration) -> Path:
    """Keep a calibration for its machine in place of an older one; returns the file."""
    path = calibration_path(calibration.machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=2).decode()
    atomic_write_text(path, text + "\n", overwrite=True)
    return path


def calibration_path(machine: Machine) -> Path:
    """Where the calibration of a machine is kept."""
    key = hashlib.sha256(msgspec.json.encode(machine)).hexdigest()[:16]
    return cache_folder() / f"calibration-{key}.json"
