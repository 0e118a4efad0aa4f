"""What tuning adds to a model: a head of one number for values and rewards, adapters."""

from napkin.model.scalar_head import add_scalar_head
from napkin.model.transformer import Transformer
from napkin.recipe.recipe import Recipe
from napkin.recipe.tuning_recipe import ReinforcementRecipe, RewardModelRecipe


def add_tuned_parts(model: Transformer, recipe: Recipe) -> None:
    """Give a model the parts that its recipe trains besides it; a recipe of pre-training has none."""
    if has_scalar_head(recipe):
        add_scalar_head(model)


def remove_tuned_parts(model: Transformer) -> None:
    """Make a tuned model one like any other: the scalar head is left out."""
    model.scalar_head = None


def has_scalar_head(recipe: Recipe) -> bool:
    """Whether a recipe trains a head of one number."""
    return isinstance(recipe, RewardModelRecipe) or (
        isinstance(recipe, ReinforcementRecipe) and recipe.rl.algorithm == "ppo"
    )
