"""What tuning adds to a model: a head of one number for values and rewards, adapters."""

import torch

from napkin.model.adapters import add_adapters, merge_adapters
from napkin.model.transformer import Transformer, add_scalar_head
from napkin.recipe.recipe import Recipe
from napkin.recipe.tuning_recipe import AdapterConfig, ReinforcementRecipe, RewardModelRecipe, TuningRecipe


def add_tuned_parts(model: Transformer, recipe: Recipe) -> None:
    """Give a model the parts that its recipe trains besides it, or in place of it; a recipe of pre-training has none.

    Raises NapkinError for adapters of matrices that the model does not have.
    """
    adapter = adapter_of(recipe)
    if adapter is not None:
        add_adapters(
            model,
            with_magnitude=adapter.kind == "dora",
            rank=adapter.rank,
            alpha=adapter.alpha,
            modules=adapter.modules,
            seed=adapter.seed,
        )
    if has_scalar_head(recipe):
        add_scalar_head(model)


def remove_tuned_parts(model: Transformer) -> None:
    """Turn a tuned model into a plain one: adapters are merged, a scalar head is left out."""
    merge_adapters(model)
    model.scalar_head = None


def adapter_of(recipe: Recipe) -> AdapterConfig | None:
    """The adapters that a recipe trains; None without."""
    return recipe.adapter if isinstance(recipe, TuningRecipe) and recipe.adapter.kind != "none" else None


def held_dtype(kind: str, frozen: str, precision: str) -> torch.dtype | None:
    """The format that frozen matrices are held in, with adapter.kind, adapter.frozen and a precision of a recipe; None
    leaves them as they are."""
    if kind == "none" or frozen != "auto":
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def has_scalar_head(recipe: Recipe) -> bool:
    """True if a recipe trains a reward model's head of one number."""
    return isinstance(recipe, RewardModelRecipe) or (
        isinstance(recipe, ReinforcementRecipe) and recipe.rl.algorithm == "ppo"
    )
