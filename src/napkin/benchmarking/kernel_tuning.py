"""Tiles of Triton's kernels chosen by timing, for the launches of a training step.

One step runs with the kernels, and each launch whose tile can be tuned is kept with its arguments. Then the operator of
each is called again and again with other tiles: from the default on, each size is halved and doubled as long as that
makes it faster. A tile whose results differ from the default's is not taken.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from napkin.kernels.triton_tiles import (
    Choice,
    Lookup,
    Tile,
    TunedTiles,
    dtype_name,
    forced,
    keep_choices,
    load_choices,
    this_device,
    watched_lookups,
)
from napkin.planning.planner import resolve
from napkin.planning.step.kernel_choice import suits_flash
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import ParallelismConfig
from napkin.train_step.step import TrainState, build_train_state

LIMITS: dict[str, tuple[int, int]] = {
    "queries": (16, 256),
    "keys": (16, 256),
    "rows": (16, 256),
    "columns": (16, 256),
    "depth": (16, 128),
    "block": (128, 16384),
    "warps": (1, 16),
    "stages": (1, 5),
}
"""The smallest and the largest size of each kind that is tried."""
GAIN = 0.02
"""The part of its seconds a tile has to save to be taken in place of another: less is noise."""
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest difference between results of two tiles, relative to the largest number: sums are taken in another
order."""

Timer = Callable[[Callable[[], object]], float]
"""Seconds of a call; infinite where the device cannot run it."""


@dataclass(frozen=True)
class TunableLaunch:
    """A launch of a step whose tile can be tuned."""

    lookup: Lookup
    operator: Callable[..., Any]
    arguments: tuple[Any, ...]
    mutates: bool
    """True if the operator changes its arguments: then two calls of it are not the same."""

    def run(self) -> Any:
        with torch.no_grad():
            return self.operator(*self.arguments)


def tunable_launches(step: Callable[[], object]) -> list[TunableLaunch]:
    """Run a step; of its launches whose tiles can be tuned the first of each kernel, dtype, width and variant."""
    catching = _Catching()
    with catching:
        step()
    return list(catching.found.values())


def tune(
    launches: list[TunableLaunch], seconds_of: Timer, *, progress: Callable[[str], None] = lambda _: None
) -> list[Choice]:
    choices = []
    for number, launch in enumerate(launches, start=1):
        lookup = launch.lookup
        progress(f"tuning {lookup.kernel} ({number} of {len(launches)})")

        def seconds_with(tile: Tile, launch: TunableLaunch = launch) -> float:
            with forced(launch.lookup.kernel, tile):
                return seconds_of(launch.run)

        best, seconds, default_seconds = fastest_tile(lookup.default, seconds_with)
        if not math.isfinite(seconds):
            # No tile runs.
            continue
        if not math.isfinite(default_seconds):
            # Nothing can be said of a default that the device does not run, and its results are not there to compare.
            default_seconds = seconds
        elif best != lookup.default and not _agrees(launch, best):
            best, seconds = lookup.default, default_seconds
        key = (lookup.kernel, dtype_name(lookup.dtype), lookup.width, lookup.variant)
        choices.append(Choice(*key, asdict(best), 1e6 * seconds, 1e6 * default_seconds))
    return choices


def fastest_tile(default: Tile, seconds_of: Callable[[Tile], float]) -> tuple[Tile, float, float]:
    """The best tile that halving and doubling finds, its seconds, and those of the default; no tile is timed twice."""
    seconds = {default: seconds_of(default)}
    best, improved = default, True
    while improved:
        improved = False
        for tile in _neighbours(best):
            if tile in seconds:
                continue
            seconds[tile] = seconds_of(tile)
            if seconds[tile] < (1 - GAIN) * seconds[best]:
                best, improved = tile, True
                break
    return best, seconds[best], seconds[default]


def gpu_seconds(run: Callable[[], object]) -> float:
    """The median of many calls on this machine's GPU, each with a cold L2 cache."""
    from triton.errors import TritonError  # pyright: ignore[reportMissingImports]
    from triton.testing import do_bench  # pyright: ignore[reportMissingImports]

    try:
        return do_bench(run, return_mode="median") / 1e3
    except TritonError:
        # Too much shared memory, too many registers, a product too small for the tensor cores.
        return math.inf


def _neighbours(tile: Tile) -> list[Tile]:
    """The tiles in which one size is half or twice as large; stages, one fewer or more."""
    neighbours: list[Tile] = []
    for name in (field.name for field in fields(tile)):
        size, (least, most) = getattr(tile, name), LIMITS[name]
        others = (size - 1, size + 1) if name == "stages" else (size // 2, size * 2)
        neighbours += [replace(tile, **{name: other}) for other in others if least <= other <= most]
    return neighbours


def _agrees(launch: TunableLaunch, tile: Tile) -> bool:
    """True if a tile gives what the default gives; in-place operators are not compared."""
    if launch.mutates:
        return True
    expected = launch.run()
    with forced(launch.lookup.kernel, tile):
        actual = launch.run()
    if isinstance(expected, Tensor):
        expected, actual = [expected], [actual]
    return all(
        not mine.numel()
        or bool((mine - theirs).abs().max() <= TOLERANCES[mine.dtype] * theirs.abs().max().clamp(min=1.0))
        for mine, theirs in zip(actual, expected, strict=True)
    )


class _Catching(TorchDispatchMode):
    """Keeps the operators of napkin that look up tiles, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[Any, ...], TunableLaunch] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func.namespace != "napkin":
            return func(*args, **(kwargs or {}))
        with watched_lookups() as lookups:
            result = func(*args, **(kwargs or {}))
        for lookup in lookups:
            key = (lookup.kernel, lookup.dtype, lookup.width, lookup.variant)
            if key not in self.found:
                self.found[key] = TunableLaunch(lookup, func, args, func._schema.is_mutable)
        return result


LAYERS = 2
"""Layers of the model whose launches are timed: further layers have the same launches."""


def tune_recipe(recipe: Recipe, *, progress: Callable[[str], None] = lambda _: None) -> TunedTiles:
    """Time the tiles of a recipe's kernels, keep the fastest, and return all that is kept for this GPU."""
    resolved = recipe_to_tune(recipe, ThisMachine(device="cuda"))
    state = build_train_state(resolved)
    progress("running a step")
    launches = tunable_launches(lambda: one_step(state))
    device = this_device()
    keep_choices(device, tune(launches, gpu_seconds, progress=progress))
    kept = load_choices(device)
    assert kept is not None
    return kept


def recipe_to_tune(recipe: Recipe, machine: ThisMachine) -> ResolvedRecipe:
    """One micro-batch of a few layers, with Triton's kernels and, where the model allows it, flash attention."""
    model, training = recipe.model, recipe.training
    attention = "flash" if model.attention == "auto" and suits_flash(model) else model.attention
    # Layers with experts come after the dense ones.
    n_layers = min(model.n_layers, max(LAYERS, model.n_dense_layers + 1))
    model = dataclasses.replace(model, attention=attention, n_layers=n_layers)
    training = dataclasses.replace(training, kernels="triton", compile="off")
    recipe = dataclasses.replace(recipe, model=model, training=training, parallelism=ParallelismConfig())
    resolved = resolve(recipe, machine)
    return resolved.with_training(batch_size=resolved.recipe.training.resolved_micro_batch_size)


def one_step(state: TrainState) -> None:
    recipe, device = state.recipe, state.precision.device_type
    shape = (recipe.training.batch_size, recipe.model.context_length)
    tokens = torch.randint(recipe.model.vocab_size, shape, device=device)
    documents = torch.zeros_like(tokens) if recipe.data.separate_documents else None
    state.step(0, tokens, tokens, documents)
