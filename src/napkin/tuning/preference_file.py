"""Preferences in files of JSON lines: read, and encoded into examples.

| form | a line |
|---|---|
| pairs | `{"prompt": "...", "chosen": "...", "rejected": "..."}`: texts, or lists of messages |
| whole conversations | `{"chosen": [...], "rejected": [...]}`: lists of messages that differ in the last one |
| unpaired preferences | `{"prompt": "...", "completion": "...", "label": true}`, for KTO; it reads pairs too |

Other fields are not read. Votes between two answers, which the studio keeps, are pairs with other fields; votes that
prefer neither answer, or judge a text that is not a conversation, are left out of training.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from napkin.chats.chat_encoder import ChatEncoder, LeftOut
from napkin.chats.chat_format import Message
from napkin.chats.chat_template import RefusedConversation
from napkin.chats.read_conversations import (
    NotText,
    WrongForm,
    as_messages,
    in_batches,
    in_line,
    json_lines,
    longer_than,
    refused,
)
from napkin.chats.token_sequence import Example, TokenSequence, sequence_of
from napkin.errors import NapkinError, suggestion
from napkin.files import StrPath
from napkin.tuning.preferences import DESIRABLE

PAIR_FIELDS = ("prompt", "chosen", "rejected")
UNPAIRED_FIELDS = ("prompt", "completion", "label")


@dataclass(frozen=True)
class Pair:
    """Two completions of a prompt, and the line that they are in."""

    line: int
    prompt: tuple[Message, ...]
    chosen: str
    rejected: str


@dataclass(frozen=True)
class UnpairedPreference:
    """A completion of a prompt that is good or bad, and the line that it is in."""

    line: int
    prompt: tuple[Message, ...]
    completion: str
    is_good: bool


Answered = TypeVar("Answered", Pair, UnpairedPreference)


def encoded_pairs(
    path: StrPath, encoder: ChatEncoder, left_out: LeftOut, max_length: int
) -> Iterator[tuple[int, Example]]:
    """Encode a file of pairs into examples (chosen, rejected), each with its line.

    Besides what `read_pairs` leaves out, pairs that the template refuses, that have the same tokens twice, or of which
    prompt and a completion are longer than `max_length` tokens are left out and counted. Raises NapkinError, naming the
    line, for what `read_pairs` raises and for a template that writes a prompt otherwise when a completion follows.
    """
    for pair, example in _encoded(path, read_pairs(path, left_out), encoder, left_out, max_length):
        chosen, rejected = example
        if np.array_equal(chosen.tokens, rejected.tokens):
            left_out.add(pair.line, "without a difference between the answers in tokens")
        else:
            yield pair.line, example


def encoded_unpaired_preferences(
    path: StrPath, encoder: ChatEncoder, left_out: LeftOut, max_length: int
) -> Iterator[tuple[int, Example]]:
    """Encode a file of unpaired preferences into examples of one completion, each with its line; `DESIRABLE` is its
    label.

    What is left out, and raised, is as in `encoded_pairs`.
    """
    for each, (completion,) in _encoded(path, read_unpaired_preferences(path, left_out), encoder, left_out, max_length):
        yield (
            each.line,
            (completion.with_values(**{DESIRABLE: np.full(completion.n_trained, each.is_good, np.float32)}),),
        )


def _encoded(
    path: StrPath, items: Iterable[Answered], encoder: ChatEncoder, left_out: LeftOut, max_length: int
) -> Iterator[tuple[Answered, tuple[TokenSequence, ...]]]:
    """Encode the completions of each item that fit after its prompt."""
    for batch in in_batches(items, _characters):
        encoded = encoder.answers([(each.prompt, _texts(each)) for each in batch])
        for each, tokens in zip(batch, encoded, strict=True):
            if isinstance(tokens, RefusedConversation):
                left_out.add(each.line, refused(tokens))
            elif isinstance(tokens, NapkinError):
                raise in_line(path, each.line, f"cannot be learned from: {tokens}")
            elif len(tokens.prompt) + max(map(len, tokens.answers)) > max_length:
                left_out.add(each.line, longer_than(max_length))
            else:
                yield each, tuple(sequence_of(tokens.prompt, answer) for answer in tokens.answers)


def _texts(item: Pair | UnpairedPreference) -> Sequence[str]:
    return (item.chosen, item.rejected) if isinstance(item, Pair) else (item.completion,)


def _characters(item: Pair | UnpairedPreference) -> int:
    """About how many characters are rendered for an item."""
    texts = _texts(item)
    prompt = sum(len(message.content) for message in item.prompt)
    return prompt * (len(item.prompt) + 1) * len(texts) + sum(map(len, texts))


def read_pairs(path: StrPath, left_out: LeftOut) -> Iterator[Pair]:
    """Read the pairs of a file, one at a time.

    Pairs with nothing to train on are counted in `left_out`: equal or empty completions, contents that are not text,
    and completions that are more than one message. Raises NapkinError, naming the line, for a line without the fields
    of a pair.
    """
    return _read(path, left_out, lambda line, fields: [_pair(line, fields)])


def read_unpaired_preferences(path: StrPath, left_out: LeftOut) -> Iterator[UnpairedPreference]:
    """Read labelled completions, one at a time; a pair is a good one and a bad one.

    What is left out, and raised, is as in `read_pairs`.
    """
    return _read(path, left_out, _judged)


def _is_undecided_vote(fields: Mapping[str, Any]) -> bool:
    return {"a", "b", "winner", "answers"} <= fields.keys() and "chosen" not in fields


def _read(path: StrPath, left_out: LeftOut, parse: Callable[[int, Mapping[str, Any]], list[Any]]) -> Iterator[Any]:
    for line, fields in json_lines(path):
        if _is_undecided_vote(fields):
            left_out.add(line, "as votes that prefer no answer to a conversation")
            continue
        try:
            example = parse(line, fields)
        except WrongForm as error:
            raise in_line(path, line, str(error)) from None
        except NotText as error:
            left_out.add(line, str(error))
        else:
            yield from example


def _pair(line: int, fields: Mapping[str, Any]) -> Pair:
    _refuse_missing(fields, ("chosen", "rejected"), PAIR_FIELDS)
    chosen, rejected = (_messages(fields[name], "assistant", name) for name in ("chosen", "rejected"))
    prompt = _messages(fields["prompt"], "user", "prompt") if "prompt" in fields else []
    if not prompt and not (len(chosen) > 1 and len(rejected) > 1):
        raise WrongForm('has no "prompt": add it, or give "chosen" and "rejected" as whole lists of messages')
    if not prompt:
        # The messages with which both begin, all but the last.
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen[:-1], rejected[:-1], strict=False))
        prompt = [message for message, _ in pairs]
        if not prompt:
            raise NotText("without a shared beginning of chosen and rejected")
    # Without a field for the prompt, it is in both completions, and in some files also with such a field.
    n = len(prompt)
    if chosen[:n] == prompt and rejected[:n] == prompt:
        chosen, rejected = chosen[n:], rejected[n:]
    pair = Pair(line, tuple(prompt), _completion(chosen), _completion(rejected))
    if pair.chosen == pair.rejected:
        raise NotText("without a difference between the answers")
    return pair


def _judged(line: int, fields: Mapping[str, Any]) -> list[UnpairedPreference]:
    if "chosen" in fields and "rejected" in fields:
        pair = _pair(line, fields)
        return [
            UnpairedPreference(line, pair.prompt, text, text == pair.chosen) for text in (pair.chosen, pair.rejected)
        ]
    _refuse_missing(fields, UNPAIRED_FIELDS, UNPAIRED_FIELDS)
    label = fields["label"]
    if not isinstance(label, bool) and label not in (0, 1):
        raise WrongForm(f"has the label {str(label)[:40]!r}: use true for a good completion, false for a bad one")
    prompt = _messages(fields["prompt"], "user", "prompt")
    completion = _completion(_messages(fields["completion"], "assistant", "completion"))
    return [UnpairedPreference(line, tuple(prompt), completion, bool(label))]


def _refuse_missing(fields: Mapping[str, Any], needed: tuple[str, ...], known: tuple[str, ...]) -> None:
    missing = next((name for name in needed if name not in fields), None)
    if missing is None:
        return
    unknown = next((name for name in fields if name not in known), None)
    hint = f"fields are {', '.join(known)}"
    if unknown is not None:
        hint = f"'{unknown[:40]}': {suggestion(unknown, known)}"
    raise WrongForm(f'has no "{missing}": {hint}')


def _messages(value: Any, role: str, name: str) -> list[Message]:
    return [Message(role, value)] if isinstance(value, str) else as_messages(value, name)


def _completion(messages: list[Message]) -> str:
    """The assistant's one message."""
    if [each.role for each in messages] != ["assistant"]:
        raise NotText("with an answer that is not one message of the assistant's")
    if not messages[0].content.strip():
        raise NotText("with an empty answer")
    return messages[0].content
