"""Whether a run on a GPU takes Triton's kernels: where they run at all, and where its plan is faster with them."""

import dataclasses
import warnings
from collections.abc import Callable

from napkin.accounting.compile_estimate import estimate_compile
from napkin.accounting.pricing import price
from napkin.model.config import WIDEST_FLASH_HEAD, ModelConfig
from napkin.planning.compile_choice import compile_obstacle
from napkin.planning.machine import Machine
from napkin.recipe.parallelism_config import ParallelismConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step_ledger import count_step

LAYERS = 2
"""Of the model whose step is priced with either form of its kernels; all layers are alike."""


def with_kernels_that_run(recipe: Recipe, machine: Machine) -> Recipe:
    """The recipe with plain kernels, and a warning, where it names Triton's and the machine does not run them."""
    if recipe.training.kernels != "triton" or (obstacle := machine.triton_obstacle()) is None:
        return recipe
    warnings.warn(f"training.kernels is 'triton', but {obstacle}; 'plain' is taken instead", stacklevel=2)
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, kernels="plain"))


def choose_triton(recipe: Recipe, precision: Precision, machine: Machine) -> Recipe:
    """The recipe for a GPU with the form of kernels and of attention written out whose step is planned to be fastest.

    Only what the recipe leaves open is chosen. Kernels are chosen for GPUs of this machine: for others a plan cannot
    know whether Triton is there. Where torch.compile would fuse the blocks, Triton's kernels have to be faster than
    that.
    """
    kernels, is_open = recipe.training.kernels, recipe.training.kernels == "auto"
    if precision.device_type != "cuda" or kernels not in ("auto", "triton"):
        return recipe
    if is_open and (not machine.measured or recipe.training.compile == "on" or machine.triton_obstacle() is not None):
        return recipe
    candidates = [_with(recipe, "triton", attention) for attention in _attentions(recipe)]
    if is_open:
        candidates.insert(0, _with(recipe, "plain", recipe.model.resolved_attention))
    return fastest(candidates, lambda candidate: planned_seconds(candidate, precision, machine))


def fastest(candidates: list[Recipe], seconds_of: Callable[[Recipe], float]) -> Recipe:
    """The recipe of the fewest seconds, the first of those that are equally fast."""
    return candidates[0] if len(candidates) == 1 else min(candidates, key=seconds_of)


def planned_seconds(recipe: Recipe, precision: Precision, machine: Machine) -> float:
    """Of one micro-batch through a few layers and the loss, and of the update, by rooflines."""
    training = recipe.training
    size = 1 if training.micro_batch_size == "auto" else training.resolved_micro_batch_size
    small = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, n_layers=min(recipe.model.n_layers, LAYERS)),
        training=dataclasses.replace(training, batch_size=size, micro_batch_size=size, recompute_every=1),
        parallelism=ParallelismConfig(),
    )
    resolved, ceilings = ResolvedRecipe(small, precision, machine.target), machine.ceilings(precision)
    ledger = count_step(resolved)
    seconds = price(ledger, ceilings).seconds
    if training.compile != "off" and compile_obstacle(resolved) is None:
        names = {"device_type": precision.device_type, "precision": precision.name}
        seconds -= estimate_compile(ledger, ceilings, **names).saved_per_step
    return seconds


def _with(recipe: Recipe, kernels: str, attention: str) -> Recipe:
    model = dataclasses.replace(recipe.model, attention=attention)
    return dataclasses.replace(recipe, model=model, training=dataclasses.replace(recipe.training, kernels=kernels))


def _attentions(recipe: Recipe) -> list[str]:
    """The forms of attention that a recipe with Triton's kernels may take."""
    usual = recipe.model.resolved_attention
    if recipe.model.attention != "auto" or recipe.parallelism.context > 1 or not suits_flash(recipe.model):
        return [usual]
    return [usual, "flash"]


def suits_flash(model: ModelConfig) -> bool:
    """Whether flash attention has a form for a model."""
    return model.positions != "alibi" and model.resolved_head_dim <= WIDEST_FLASH_HEAD
