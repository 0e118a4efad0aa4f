"""Pairs and judged answers of a file become units of tokens; see `napkin.alignment.pair_file` for the lines."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from napkin.alignment.chats.chat_encoder import ChatEncoder
from napkin.alignment.chats.chat_encoding import in_batches, longer_than, refused
from napkin.alignment.chats.json_lines import in_line
from napkin.alignment.chats.left_out import LeftOut
from napkin.alignment.pair_file import JudgedAnswer, Pair, read_judged_answers, read_pairs
from napkin.alignment.preferences.kto import DESIRABLE
from napkin.alignment.token_sequence import TokenSequence, Unit, sequence_of
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.inference.chat_template import RefusedConversation

Answered = TypeVar("Answered", Pair, JudgedAnswer)


def encoded_pairs(
    path: StrPath, encoder: ChatEncoder, left_out: LeftOut, max_length: int
) -> Iterator[tuple[int, Unit]]:
    """The units (chosen, rejected) of a file, each with its line.

    Besides what `read_pairs` leaves out, those that the template refuses, that have the same tokens twice, or of which
    prompt and an answer are longer than `max_length` tokens are left out and counted. Raises NapkinError, naming the
    line, for what `read_pairs` raises and for a template that writes a prompt otherwise when an answer follows.
    """
    for pair, unit in _encoded(path, read_pairs(path, left_out), encoder, left_out, max_length):
        chosen, rejected = unit
        if np.array_equal(chosen.tokens, rejected.tokens):
            left_out.add(pair.line, "without a difference between the answers in tokens")
        else:
            yield pair.line, unit


def encoded_judged_answers(
    path: StrPath, encoder: ChatEncoder, left_out: LeftOut, max_length: int
) -> Iterator[tuple[int, Unit]]:
    """The units (answer) of a file, each with its line; `DESIRABLE` is whether it is a good one.

    What is left out, and raised, is as in `encoded_pairs`.
    """
    for each, (answer,) in _encoded(path, read_judged_answers(path, left_out), encoder, left_out, max_length):
        yield each.line, (answer.with_values(**{DESIRABLE: np.full(answer.n_counted, each.is_good, np.float32)}),)


def _encoded(
    path: StrPath, items: Iterable[Answered], encoder: ChatEncoder, left_out: LeftOut, max_length: int
) -> Iterator[tuple[Answered, tuple[TokenSequence, ...]]]:
    """The answers of each item that fit behind its prompt."""
    for batch in in_batches(items, _characters):
        found = encoder.answers([(each.prompt, _texts(each)) for each in batch])
        for each, tokens in zip(batch, found, strict=True):
            if isinstance(tokens, RefusedConversation):
                left_out.add(each.line, refused(tokens))
            elif isinstance(tokens, NapkinError):
                raise in_line(path, each.line, f"cannot be learned from: {tokens}")
            elif len(tokens.prompt) + max(map(len, tokens.answers)) > max_length:
                left_out.add(each.line, longer_than(max_length))
            else:
                yield each, tuple(sequence_of(tokens.prompt, answer) for answer in tokens.answers)


def _texts(item: Pair | JudgedAnswer) -> Sequence[str]:
    return (item.chosen, item.rejected) if isinstance(item, Pair) else (item.answer,)


def _characters(item: Pair | JudgedAnswer) -> int:
    """Of what is rendered, about."""
    texts = _texts(item)
    prompt = sum(len(message.content) for message in item.prompt)
    return prompt * (len(item.prompt) + 1) * len(texts) + sum(map(len, texts))
