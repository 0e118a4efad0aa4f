"""Supervised fine-tuning as a method of `napkin tune`: conversations in, the likelihood of what is learned up."""

from hashlib import sha256

from napkin.alignment.chats.chat_tokens import ChatTokens
from napkin.alignment.chats.chat_writer import chat_tokens_of
from napkin.alignment.method import TuningContext
from napkin.alignment.supervised import SupervisedObjective
from napkin.alignment.unit_method import UnitMethod
from napkin.errors import NapkinError
from napkin.files import StrPath


def supervised_method(context: TuningContext) -> UnitMethod:
    """Of a recipe: data.train and data.validation are JSON lines of conversations, or files of `napkin data chat`.

    Says what was left out of them. Raises NapkinError where they cannot be read or hold nothing to learn from.
    """
    recipe, tuning = context.recipe, context.recipe.tuning
    most = longest_sequence(context)
    if not recipe.data.train:
        raise NapkinError("no conversations to learn from are named: use --data.train with a file of JSON lines")
    assert isinstance(recipe.data.train, str)
    if not context.encoder.end_ids:
        context.on_message(
            "the chat template ends answers with text and not with a special token: the tuned model may not know where "
            "to end"
        )
    train = _opened(context, recipe.data.train, most)
    held_out = None if recipe.data.validation is None else _opened(context, recipe.data.validation, most)
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


def _opened(context: TuningContext, path: StrPath, max_length: int) -> ChatTokens:
    chats = chat_tokens_of(
        path,
        context.encoder,
        max_length=max_length,
        progress=lambda n: None if n % 1000 else context.progress(f"encoding {n:,} conversations"),
    )
    if left_out := chats.about.left_out:
        n, reasons = sum(left_out.values()), ", ".join(f"{n:,} {reason}" for reason, n in left_out.items())
        context.on_message(f"'{path}': {n:,} of {n + len(chats):,} conversations are left out: {reasons}")
    return chats
