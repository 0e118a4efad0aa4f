"""The sizes of a recipe that the rules of thumb take."""

from napkin.accounting.rules_table import Sizes
from napkin.recipe.recipe import Recipe


def sizes_of(recipe: Recipe) -> Sizes:
    """The sizes of a resolved recipe of one device."""
    model, training = recipe.model, recipe.training
    return Sizes(
        vocab_size=model.vocab_size,
        d_model=model.d_model,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=model.resolved_n_kv_heads,
        d_ff=model.resolved_d_ff,
        tied=model.tie_embeddings,
        batch_size=training.resolved_micro_batch_size,
        sequences=training.batch_size,
        context_length=model.context_length,
    )
