"""The model that a run has made, as any run's: what tuning had added to it is merged, or left out."""

from napkin.checkpoint.load import load_averaged_model
from napkin.checkpoint.state import Checkpoint
from napkin.model.transformer import Transformer
from napkin.recipe.recipe import Recipe
from napkin.train_step.tuned_model import add_tuned_parts, remove_tuned_parts


def load_plain_model(checkpoint: Checkpoint, recipe: Recipe) -> Transformer:
    """The model of a checkpoint with its averaged weights, if it has any, adapters merged; a scalar head is left out.

    Raises as `load_model` does.
    """
    model = load_tuned_model(checkpoint, recipe)
    remove_tuned_parts(model)
    return model


def load_tuned_model(checkpoint: Checkpoint, recipe: Recipe) -> Transformer:
    """The same with what tuning has added to it."""
    model = Transformer(recipe.model)
    add_tuned_parts(model, recipe)
    load_averaged_model(checkpoint, model)
    return model
