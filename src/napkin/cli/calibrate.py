"""`napkin calibrate`."""

from dataclasses import dataclass

from napkin.cli.terminal import out, parse, print_json, progress_line
from napkin.units import format_bytes, format_rate, format_seconds


@dataclass(frozen=True)
class CalibrateOptions:
    """Measure this machine anew: matrix products, memory bandwidth, the cost of calling an operator."""

    device: str = "auto"
    """auto, cpu or cuda."""
    json: bool = False
    """Print the result for programs."""


def main(arguments: list[str]) -> None:
    """Measure this machine and keep the result in the user's cache."""
    options = parse(CalibrateOptions, "calibrate", arguments)
    with progress_line("measuring this machine"):
        from napkin.hardware.calibration import calibrate
        from napkin.hardware.calibration_cache import save_calibration
        from napkin.training.precision import choose_device

        calibration = calibrate(choose_device(options.device))  # pyright: ignore[reportArgumentType]
        path = save_calibration(calibration)
    if options.json:
        print_json(calibration)
        return
    for name in calibration.formats:
        out.print(f"{name} matrix products: {format_rate(calibration.matmul_peak(name))}")
    out.print(f"memory: {format_bytes(calibration.memory_bandwidth)}/s")
    out.print(f"calling an operator: {format_seconds(calibration.seconds_per_operator)}")
    out.print(f"wrote {path}", soft_wrap=True)
