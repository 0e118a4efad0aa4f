"""`napkin calibrate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import print_json, say
from napkin.units import format_bytes, format_rate, format_seconds


@dataclass(frozen=True)
class CalibrateOptions(JsonOption):
    """Measure this machine again: matrix products, memory bandwidth, the overhead of an operator call. Of two
    measurements of the same thing the faster one is kept, because other processes can only slow it down; one on a quiet
    machine is kept in place of one on a busy machine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to measure; auto is the GPU if there is one."""

    device_file: Path | None = None
    """Also write a TOML file that describes the device as measured: with `plan --on 64xFILE` its coefficients replace
    those of published runs."""


@command("calibrate", CalibrateOptions)
def main(options: CalibrateOptions) -> None:
    with progress_line("measuring this machine") as line:
        import torch

        from napkin.files import atomic_write_text
        from napkin.hardware.calibration_cache import calibration_of_this_machine, calibration_path
        from napkin.hardware.host import usable_cores
        from napkin.hardware.measured_device import measured_device
        from napkin.recipe.precision import choose_device

        device_type = choose_device(options.device)
        # As many threads as training uses: a calibration holds for one number of threads.
        torch.set_num_threads(usable_cores())
        calibration = calibration_of_this_machine(
            device_type, again=True, progress=lambda fraction: line(round(100 * fraction), 100)
        )
    if options.device_file is not None:
        atomic_write_text(options.device_file, measured_device(calibration))
    if options.json:
        print_json(calibration)
        return
    for name in calibration.formats:
        say(f"{name} matrix products: {format_rate(calibration.matmul_peak(name))}")
    say(f"memory bandwidth: {format_bytes(calibration.memory_bandwidth)}/s")
    say(f"overhead per operator call: {format_seconds(calibration.seconds_per_operator)}")
    if calibration.disturbed and calibration.conditions is not None:
        say(
            f"measured on a busy machine, where {calibration.conditions.describe()}: rates are at least these; the "
            "next plan on a quiet machine measures again"
        )
    say(f"kept in {calibration_path(calibration.machine)}", wrap=False)
    if options.device_file is not None:
        say(f"described in {options.device_file}: use it as in napkin plan --on 8x{options.device_file}", wrap=False)
