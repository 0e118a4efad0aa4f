"""Supervised fine-tuning: conversations become units of one sequence, whose answers count."""

from collections.abc import Callable
from hashlib import sha256

from napkin.alignment.chats.chat_encoder import ChatEncoder
from napkin.alignment.chats.left_out import LeftOut
from napkin.alignment.chats.read_conversations import read_chats
from napkin.alignment.method import TuningContext
from napkin.alignment.supervised import SupervisedObjective
from napkin.alignment.token_sequence import Unit
from napkin.alignment.unit_method import UnitMethod
from napkin.errors import NapkinError
from napkin.files import read_bytes


def supervised_method(context: TuningContext) -> UnitMethod:
    """The method of a recipe. Raises NapkinError where data.train is not a file of conversations."""
    recipe = context.recipe
    longest = recipe.tuning.max_length or recipe.model.context_length + 1
    train, validation = recipe.data.train, recipe.data.validation
    if not isinstance(train, str) or not train:
        raise NapkinError("no conversations are named: use --data.train with a JSONL file")
    context.progress("encoding the conversations")
    units = conversation_units(train, context.encoder, longest, context.on_message)
    held_out = (
        [] if validation is None else conversation_units(validation, context.encoder, longest, context.on_message)
    )
    checksum = sha256(read_bytes(train) + context.encoder.fingerprint.encode()).hexdigest()
    objective = SupervisedObjective(recipe.tuning.normalisation, float(longest))
    return UnitMethod(recipe, units, held_out, checksum, objective)


def conversation_units(path: str, encoder: ChatEncoder, longest: int, on_message: Callable[[str], None]) -> list[Unit]:
    """The conversations of a file as units; what is left out is told."""
    left_out = LeftOut()
    units: list[Unit] = []
    for conversation in read_chats(path, left_out):
        sequence = encoder.sequence(conversation.messages)
        if len(sequence.tokens) > longest:
            left_out.add(conversation.line, f"longer than {longest:,} tokens")
        else:
            units.append((sequence,))
    if said := left_out.describe():
        on_message(f"'{path}': {said}")
    return units
