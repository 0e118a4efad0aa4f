"""The parts of a machine and their speed: `napkin doctor`, `napkin calibrate`, `napkin autotune`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from napkin.cli.common.options import JsonOption, Switch, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeOptions, RecipeSource, recipe_command
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.errors import NapkinError
from napkin.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from napkin.kernels.triton_tiles import TunedTiles


MARKS = {"fine": "ok", "lacking": "–", "broken": "BROKEN"}


@dataclass(frozen=True)
class DoctorOptions(JsonOption):
    """Say what this machine has and lacks: processor, memory, libraries, GPU, compiler, extras, calibration, caches.
    Each is tried. The status is 1 if something that napkin needs is broken, else 0; what is only lacking, such as a
    GPU, does not count."""


@command("doctor", DoctorOptions)
def doctor_command(options: DoctorOptions) -> int:
    with progress_line("examining this machine"):
        from napkin.hardware.doctor import examine

        findings = examine()
    broken = [finding for finding in findings if finding.state == "broken"]
    if options.json:
        print_json({"broken": bool(broken), "findings": [asdict(finding) for finding in findings]})
        return bool(broken)
    print_table((), [(MARKS[finding.state], finding.what, finding.found) for finding in findings])
    for finding in findings:
        if finding.remedy:
            say(f"{finding.what}: {finding.remedy}")
    say("broken: " + ", ".join(finding.what for finding in broken) if broken else "nothing that napkin needs is broken")
    return int(bool(broken))


@dataclass(frozen=True)
class CalibrateOptions(JsonOption):
    """Measure this machine again: matrix products, memory bandwidth, the overhead of an operator call. Of two
    measurements of the same thing the faster one is kept, because other processes can only slow it down; one on a quiet
    machine is kept in place of one on a busy machine. Forms of operators that were chosen by timing are forgotten, and
    timed again by the next plan that needs them."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure; auto is the GPU if there is one."""

    device_file: Path | None = None
    """Also write a TOML file that describes the device as measured: with `plan --on 64xFILE` its coefficients replace
    those of published runs."""


@command("calibrate", CalibrateOptions)
def calibrate_command(options: CalibrateOptions) -> None:
    with progress_line("measuring this machine") as line:
        import torch

        from napkin.files import atomic_write_text
        from napkin.hardware.calibration_cache import calibration_of_this_machine, calibration_path
        from napkin.hardware.host import usable_cores
        from napkin.hardware.measured_device import measured_device
        from napkin.kernels.operator_forms import forget_choices
        from napkin.recipe.precision import choose_device

        device_type = choose_device(options.device)
        # The number of threads that training uses: a calibration holds for one number of threads.
        torch.set_num_threads(usable_cores())
        forget_choices()
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


@dataclass(frozen=True)
class AutotuneOptions(RecipeOptions, JsonOption):
    """Choose the tiles of the Triton kernels that a recipe's training step launches, by timing them on this machine's
    GPU, and keep them in the user's cache, where runs with training.kernels = "triton" find them. Takes some minutes,
    most of them for compiling."""

    show: Switch = False
    """Print the choices that are kept for every GPU, and time nothing."""


@recipe_command("autotune", AutotuneOptions)
def autotune_command(options: AutotuneOptions, _: RecipeSource) -> None:
    if options.show:
        with progress_line("loading"):
            from napkin.kernels.triton_tiles import all_choices
        kept = all_choices()
    else:
        kept = [_tuned(options)]
    if options.json:
        print_json(kept)
        return
    for each in kept:
        device = each.device
        say(f"{device.name} ({device.capability}), Triton {device.triton}, kernels {device.kernels}")
        rows = [
            (
                *(choice.kernel, choice.dtype, str(choice.width), choice.variant or "–"),
                ", ".join(f"{name} {size}" for name, size in choice.tile.items()),
                f"{choice.microseconds:.1f}",
                f"{choice.default_microseconds:.1f}",
                f"{choice.default_microseconds / choice.microseconds:.2f}",
            )
            for choice in sorted(each.choices, key=lambda choice: choice.key)
        ]
        print_table(("kernel", "dtype", "width", "variant", "tile", "µs", "default µs", "×"), rows, align="llrllrrr")
    if not kept:
        say("no tiles are kept: `napkin autotune RECIPE` times them on a GPU")


def _tuned(options: AutotuneOptions) -> "TunedTiles":
    with progress_line("preparing") as line:
        from napkin.benchmarking.kernel_tuning import tune_recipe
        from napkin.kernels.operators import is_interpreted, triton_obstacle
        from napkin.recipe.precision import choose_device

        device_type = choose_device(options.recipe.training.device)
        if (obstacle := triton_obstacle(device_type)) is not None or is_interpreted():
            raise NapkinError(f"there is nothing to tune here: {obstacle or 'the interpreter has no tiles'}")
        return tune_recipe(options.recipe, progress=line.retitle)
