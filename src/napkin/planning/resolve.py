"""Resolving a recipe: fields that it leaves open are set from its tokenizer and the devices that it is for."""

import dataclasses
from pathlib import Path

from napkin.errors import NapkinError
from napkin.planning.compile_choice import refuse_impossible_compile
from napkin.planning.kernel_choice import choose_kernels
from napkin.planning.machine import Machine
from napkin.planning.micro_batch import largest_micro_batch
from napkin.planning.triton_choice import choose_triton, with_kernels_that_run
from napkin.recipe.layout_check import refuse_impossible_layout
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.tokenizer.tokenizer_file import load_tokenizer


def resolve(recipe: Recipe, machine: Machine) -> ResolvedRecipe:
    """The recipe with every default written out; with micro_batch_size "auto" its step is counted.

    Raises NapkinError where the batch does not divide among the devices, and where the devices do not support
    what the recipe asks for.
    """
    recipe = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, vocab_size=vocab_size_of(recipe)),
        optimizer=dataclasses.replace(recipe.optimizer.resolved, warmup_steps=recipe.warmup_steps),
    )
    precision = machine.precision(recipe.training.precision)
    recipe = dataclasses.replace(recipe, training=machine.training(recipe.training, precision))
    recipe = choose_triton(with_kernels_that_run(recipe, machine), precision, machine)
    resolved = ResolvedRecipe(choose_kernels(recipe, precision), precision, machine.target, machine.n_devices)
    _ = resolved.per_device
    refuse_impossible_layout(recipe, resolved.layout)
    if machine.measured:
        refuse_impossible_compile(resolved)
    if recipe.training.offload_optimizer and precision.device_type == "cpu":
        raise NapkinError(
            "training.offload_optimizer is True, but the run is on a CPU, whose optimizer state is in host memory "
            "anyway: leave it out"
        )
    if recipe.training.micro_batch_size == "auto":
        size = largest_micro_batch(resolved, machine.memory_bytes)
        resolved = resolved.with_training(micro_batch_size=size)
    return resolved


def with_vocab_size(recipe: Recipe, vocab_size: int) -> Recipe:
    """The recipe for a tokenizer of that size. Raises NapkinError where the recipe gives another one."""
    if recipe.model.vocab_size not in (0, vocab_size):
        raise NapkinError(
            f"model.vocab_size is {recipe.model.vocab_size}, the tokenizer has {vocab_size}: "
            "leave the field out or use that number"
        )
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, vocab_size=vocab_size))


def vocab_size_of(recipe: Recipe) -> int:
    """The recipe's model.vocab_size or, if it is 0, that of its tokenizer."""
    if recipe.model.vocab_size:
        return recipe.model.vocab_size
    if not Path(recipe.data.tokenizer).is_file():
        raise NapkinError(
            f"there is no tokenizer file '{recipe.data.tokenizer}', so the vocabulary is unknown: "
            "give its size with --model.vocab-size, or a tokenizer with --data.tokenizer"
        )
    return load_tokenizer(recipe.data.tokenizer).vocab_size
