"""Preferences from files of JSON lines; `napkin.tuning.example_file` makes examples of them.

| form | a line |
|---|---|
| pairs | `{"prompt": "...", "chosen": "...", "rejected": "..."}`: texts, or lists of messages |
| whole conversations | `{"chosen": [...], "rejected": [...]}`: lists of messages that differ in the last one |
| unpaired preferences | `{"prompt": "...", "completion": "...", "label": true}`, for KTO; it reads pairs too |

Other fields are not read.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from napkin.chats.chat_encoder import LeftOut
from napkin.chats.chat_format import Message
from napkin.chats.read_conversations import NotText, WrongForm, as_messages, in_line, json_lines
from napkin.errors import suggestion
from napkin.files import StrPath

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


def _read(path: StrPath, left_out: LeftOut, parse: Callable[[int, Mapping[str, Any]], list[Any]]) -> Iterator[Any]:
    for line, fields in json_lines(path):
        try:
            found = parse(line, fields)
        except WrongForm as error:
            raise in_line(path, line, str(error)) from None
        except NotText as error:
            left_out.add(line, str(error))
        else:
            yield from found


def _pair(line: int, fields: Mapping[str, Any]) -> Pair:
    _refuse_missing(fields, ("chosen", "rejected"), PAIR_FIELDS)
    chosen, rejected = (_messages(fields[name], "assistant", name) for name in ("chosen", "rejected"))
    prompt = _messages(fields["prompt"], "user", "prompt") if "prompt" in fields else []
    if not prompt and not (len(chosen) > 1 and len(rejected) > 1):
        raise WrongForm('has no "prompt": add it, or give "chosen" and "rejected" as whole lists of messages')
    if not prompt:
        prompt = chosen[: min(_shared(chosen, rejected), len(chosen) - 1, len(rejected) - 1)]
        if not prompt:
            raise NotText("without a shared beginning of chosen and rejected")
    # Without a field of its own the prompt stands in both completions, and in some files with one as well.
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


def _shared(chosen: list[Message], rejected: list[Message]) -> int:
    """Count the messages that two lists begin with alike."""
    differ = (number for number, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other)
    return next(differ, min(len(chosen), len(rejected)))


def _completion(messages: list[Message]) -> str:
    """The assistant's one message."""
    if [each.role for each in messages] != ["assistant"]:
        raise NotText("with an answer that is not one message of the assistant's")
    if not messages[0].content.strip():
        raise NotText("with an empty answer")
    return messages[0].content
