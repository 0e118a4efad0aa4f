"""A resolved recipe, in which every default is written out. Plans count it, and ranks train it.

`napkin.planning.planner` makes it once, from a recipe and the devices that it is for.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Literal

from napkin.errors import NapkinError
from napkin.hardware.target import Target
from napkin.recipe.layout import Layout, Strategy, layout_of_recipe
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe with its defaults written out, the number formats on its devices, and how many devices there are."""

    recipe: Recipe
    """The recipe of the whole run: the batch is that of all devices together."""
    precision: Precision
    target: Target | None = None
    """The device that a step is counted for, as `napkin.count` takes it; None is the kind that `precision` names."""
    world_size: int = 1
    """Devices, or processes, that train together."""

    @property
    def counted_for(self) -> Target:
        return self.precision.device_type if self.target is None else self.target

    @functools.cached_property
    def layout(self) -> Layout:
        """The ranks of each dimension. Raises NapkinError where the recipe's sizes do not make `world_size`."""
        return layout_of_recipe(self.recipe, self.world_size)

    @property
    def strategy(self) -> Strategy:
        """The way in which devices average gradients: a single device uses neither `ddp` nor `fsdp`."""
        return self.layout.strategy

    @property
    def gather_format(self) -> Literal["fp32", "bf16"]:
        """The format in which fsdp gathers the parameters of blocks: fp16 has too little range for weights."""
        chosen = self.recipe.training.gather_format
        if chosen != "auto":
            return chosen
        return "bf16" if self.precision.products == "bf16" else "fp32"

    @property
    def per_device(self) -> Recipe:
        return per_device(self.recipe, self.layout.batch_parts)

    def with_training(self, **changes: Any) -> "ResolvedRecipe":
        training = dataclasses.replace(self.recipe.training, **changes)
        return dataclasses.replace(self, recipe=dataclasses.replace(self.recipe, training=training))

    def with_model(self, **changes: Any) -> "ResolvedRecipe":
        model = dataclasses.replace(self.recipe.model, **changes)
        return dataclasses.replace(self, recipe=dataclasses.replace(self.recipe, model=model))


def per_device(recipe: Recipe, parts: int) -> Recipe:
    """The recipe with one of `parts` parts of the batch: that of a device, or of devices that compute it together.

    Raises NapkinError where the batch does not divide among the devices, or a device's part into micro-batches.
    """
    training = recipe.training
    batch_size, rest = divmod(training.batch_size, parts)
    if rest or not batch_size:
        raise NapkinError(
            f"training.batch_size {training.batch_size} does not divide among {parts} devices: "
            f"use a multiple, --training.batch-size {parts * -(-training.batch_size // parts)}"
        )
    size = min(training.resolved_micro_batch_size, batch_size)
    if batch_size % size:
        raise NapkinError(
            f"each of {parts} devices gets {batch_size} sequences, which do not divide into micro-batches of "
            f"{size}: choose a --training.micro-batch-size that divides them"
        )
    if parts == 1:
        return recipe
    # "auto" is resolved where the device's memory is known.
    micro_batch_size = "auto" if training.micro_batch_size == "auto" else size
    training = dataclasses.replace(training, batch_size=batch_size, micro_batch_size=micro_batch_size)
    return dataclasses.replace(recipe, training=training)
