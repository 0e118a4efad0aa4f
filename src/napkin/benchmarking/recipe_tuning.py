"""The tiles of a recipe's step, tuned on this machine's GPU."""

import dataclasses
from collections.abc import Callable

import torch

from napkin.benchmarking.kernel_tuning import gpu_seconds, tunable_launches, tune
from napkin.kernels.triton.tuned_tiles import TunedTiles, keep_choices, load_choices, this_device
from napkin.planning.machine import ThisMachine
from napkin.planning.resolve import resolve
from napkin.planning.triton_choice import suits_flash
from napkin.recipe.parallelism_config import ParallelismConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step import TrainState, build_train_state

LAYERS = 2
"""Of the model whose launches are timed: those of further layers are alike."""


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
    """Of random tokens."""
    recipe, device = state.recipe, state.precision.device_type
    shape = (recipe.training.batch_size, recipe.model.context_length)
    tokens = torch.randint(recipe.model.vocab_size, shape, device=device)
    documents = torch.zeros_like(tokens) if recipe.data.separate_documents else None
    state.step(0, tokens, tokens, documents)
