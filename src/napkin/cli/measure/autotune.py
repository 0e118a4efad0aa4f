"""`napkin autotune`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from napkin.cli.common.options import JsonOption, Switch
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeOptions, RecipeSource, recipe_command
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from napkin.kernels.triton_tiles import TunedTiles


@dataclass(frozen=True)
class AutotuneOptions(RecipeOptions, JsonOption):
    """Choose the tiles of the Triton kernels that a recipe's training step launches, by timing them on this machine's
    GPU, and keep them in the user's cache, where runs with training.kernels = "triton" find them. Takes some minutes,
    most of them for compiling."""

    show: Switch = False
    """Print what is kept, for any GPU, and time nothing."""


@recipe_command("autotune", AutotuneOptions)
def main(options: AutotuneOptions, _: RecipeSource) -> None:
    kept = _kept() if options.show else [_tuned(options)]
    if options.json:
        print_json(kept)
        return
    for each in kept:
        _print(each)
    if not kept:
        say("no tiles are kept: `napkin autotune RECIPE` times them on a GPU")


def _kept() -> "list[TunedTiles]":
    with progress_line("loading"):
        from napkin.kernels.triton_tiles import all_choices
    return all_choices()


def _tuned(options: AutotuneOptions) -> "TunedTiles":
    with progress_line("preparing") as line:
        from napkin.benchmarking.kernel_tuning import tune_recipe
        from napkin.kernels.triton_usable import is_interpreted, triton_obstacle
        from napkin.recipe.precision import choose_device

        device_type = choose_device(options.recipe.training.device)
        if (obstacle := triton_obstacle(device_type)) is not None or is_interpreted():
            raise NapkinError(f"there is nothing to tune here: {obstacle or 'the interpreter has no tiles'}")
        return tune_recipe(options.recipe, progress=line.retitle)


def _print(kept: "TunedTiles") -> None:
    device = kept.device
    say(f"{device.name} ({device.capability}), Triton {device.triton}, kernels {device.kernels}")
    rows = [
        (
            choice.kernel,
            choice.dtype,
            str(choice.width),
            choice.variant or "–",
            ", ".join(f"{name} {size}" for name, size in choice.tile.items()),
            f"{choice.microseconds:.1f}",
            f"{choice.default_microseconds:.1f}",
            f"{choice.default_microseconds / choice.microseconds:.2f}",
        )
        for choice in sorted(kept.choices, key=lambda choice: choice.key)
    ]
    print_table(("kernel", "dtype", "width", "variant", "tile", "µs", "default µs", "×"), rows, align="llrllrrr")
