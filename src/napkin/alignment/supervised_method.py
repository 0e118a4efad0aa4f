"""Supervised fine-tuning as a method of `napkin tune`: conversations in, the likelihood of what is learned up."""

from hashlib import sha256

from napkin.alignment.method import TuningContext
from napkin.alignment.supervised import SupervisedObjective
from napkin.alignment.tuning_files import opened_units
from napkin.alignment.unit_method import UnitMethod
from napkin.errors import NapkinError


def supervised_method(context: TuningContext) -> UnitMethod:
    """Of a recipe: data.train and data.validation are JSON lines of conversations, or files of `napkin data chat`.

    Says what was left out of them. Raises NapkinError where they cannot be read or hold nothing to learn from.
    """
    recipe, tuning = context.recipe, context.recipe.tuning
    most = longest_sequence(context)
    if not context.encoder.end_ids:
        context.on_message(
            "the chat template ends answers with text and not with a special token: the tuned model may not know where "
            "to end"
        )
    train, held_out = opened_units(context, "conversations", max_length=most)
    checksum = (
        train.checksum if held_out is None else sha256(f"{train.checksum} {held_out.checksum}".encode()).hexdigest()
    )
    objective = SupervisedObjective(tuning.normalisation, float(most))
    return UnitMethod(recipe, train, held_out or (), checksum, objective)


def longest_sequence(context: TuningContext) -> int:
    """Tokens that a sequence may have. Raises NapkinError for more than the model's context length."""
    chosen, limit = context.recipe.tuning.max_length, context.recipe.model.context_length
    if chosen > limit:
        raise NapkinError(f"tuning.max_length is {chosen:,}, the model's context length is {limit:,}: use at most that")
    return chosen or limit
