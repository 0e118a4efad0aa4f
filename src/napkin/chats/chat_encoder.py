"""Conversations become tokens with a loss mask of what the assistant says, by the model's chat template.

Models without a template get the built-in one: a line per message, which begins with its role. `LeftOut` counts what of
a file is not trained on, by reason.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np

from napkin.chats.chat_format import Answers, EncodedChat, Message, TemplateChat
from napkin.chats.chat_template import ChatTemplate
from napkin.chats.token_sequence import TokenSequence
from napkin.data.token_file import SEPARATOR
from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.inspection import printable
from napkin.tokenizer.text_input import split_at

_SOURCE = """\
{{- START }}{% for message in messages %}\
{{ message.role + ': ' + message.content | trim }}{% if message.role == 'assistant' %}{{ END }}{% endif %}{{ '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""


def built_in_template(start: str, end: str) -> str:
    """The built-in template in jinja, with `start` before every text and `end` behind each answer of the assistant.

    The text is that of `napkin.chats.chat_format.PlainChat` with `end` behind each answer.
    """
    # A text as jinja2 writes it: JSON's form, but for characters beyond ASCII.
    start, end = (json.dumps(text, ensure_ascii=False) for text in (start, end))
    return _SOURCE.replace("START", start).replace("END", end)


TrainOn = Literal["assistant", "last", "all"]


class Answered(NamedTuple):
    """The tokens of a prompt, and those of each answer after it."""

    prompt: list[int]
    answers: list[list[int]]


class NothingTrainedOn(NapkinError):
    """No token of a conversation would be trained on."""


class ChatEncoder:
    """Turns conversations into token sequences, for training and for asking alike.

    `template` None is the built-in one, a line per message that begins with its role: it begins a conversation with
    `first_ids` and ends an answer with the first of `stop_ids`, none is `<|endoftext|>`. `train_on` is every answer of
    the assistant's with the token that ends it, the last one, or all tokens. `tools` are JSON schemas of functions,
    which a template may describe to the model. Raises NapkinError for a template that cannot be read.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        first_ids: Sequence[int] = (),
        *,
        stop_ids: Sequence[int] = (),
        train_on: TrainOn = "assistant",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if template is None:
            start = "".join(_special_text(tokenizer, each) for each in first_ids)
            end = _special_text(tokenizer, stop_ids[0]) if stop_ids else SEPARATOR
            if end not in tokenizer.special_tokens:
                raise NapkinError(f"the tokenizer has no {end} to end answers: give a chat template")
            template = ChatTemplate(built_in_template(start, end))
        self.tokenizer = tokenizer
        self.train_on: TrainOn = train_on
        self.template, self.tools = template, tuple(tools)
        self._format = TemplateChat(tokenizer, template, tools)
        self._text_stop_ids = tuple(stop_ids)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "ChatEncoder":
        """The encoder of conversations in which the assistant may call these tools."""
        stop_ids = self._text_stop_ids
        return ChatEncoder(self.tokenizer, self.template, stop_ids=stop_ids, train_on=self.train_on, tools=tools)

    def sequence(self, messages: Sequence[Message]) -> TokenSequence:
        """Encode a conversation up to its last trained token.

        Raises NapkinError where the template refuses the messages or changes what it wrote of earlier ones,
        NothingTrainedOn where no token is trained on.
        """
        (sequence,) = self.sequences([messages])
        if isinstance(sequence, NapkinError):
            raise sequence
        return sequence

    def sequences(self, conversations: Sequence[Sequence[Message]]) -> list[TokenSequence | NapkinError]:
        """`sequence` of each conversation, faster than one by one. A conversation gives its error instead of a sequence
        if the template refuses it, if the template changes earlier turns once more follow, or if it has no trained
        token; other errors are raised.
        """
        wanted: Answers = "all" if self.train_on == "assistant" else "last" if self.train_on == "last" else "none"
        encoded = self._format.encode_batch(conversations, wanted)
        return [each if isinstance(each, NapkinError) else self._sequence(each) for each in encoded]

    def _sequence(self, encoded: EncodedChat) -> TokenSequence | NothingTrainedOn:
        tokens = np.array(encoded.ids, dtype=np.int64)
        loss_mask = np.full(len(tokens), self.train_on == "all")
        if self.train_on != "all":
            for begin, end in encoded.answers:
                loss_mask[begin:end] = True
        # Nothing comes before the first token.
        loss_mask[:1] = False
        if not loss_mask.any():
            return NothingTrainedOn("no token of the conversation is learned: it needs an answer of the assistant's")
        length = int(np.flatnonzero(loss_mask)[-1]) + 1
        return TokenSequence(tokens[:length], loss_mask[:length])

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Encode messages up to where the answer to the last one begins, as the model is asked."""
        return self._format.encode(messages)

    def answer(self, messages: Sequence[Message], text: str) -> list[int]:
        """Encode an answer behind the `prompt` of its messages, with the token that ends it.

        Raises NapkinError where the template changes the prompt when the answer follows.
        """
        (answer,) = self.answers([(messages, [text])])
        if isinstance(answer, NapkinError):
            raise answer
        return answer.answers[0]

    def answers(self, asked: Sequence[tuple[Sequence[Message], Sequence[str]]]) -> list[Answered | NapkinError]:
        """`prompt` and `answer` of several prompts, each with the texts that answer it, faster than one by one.

        A prompt that the template refuses or writes otherwise when an answer follows gives its error instead; other
        errors are raised.
        """
        prompts = self._format.encode_prompts([messages for messages, _ in asked])
        chats = [[*messages, Message("assistant", text)] for messages, texts in asked for text in texts]
        encoded = iter(self._format.encode_batch(chats, "last"))
        return [
            _answered(prompt, [next(encoded) for _ in texts]) for prompt, (_, texts) in zip(prompts, asked, strict=True)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens, leaving out stop ids."""
        stop_ids = self.stop_ids
        return self.tokenizer.decode([each for each in ids if each not in stop_ids])

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The special token that ends an answer; empty if the template has none, so that no end is trained on."""
        return self._format.stop_ids()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids at which an answer or a text ends."""
        return tuple(dict.fromkeys((*self.end_ids, *self._text_stop_ids)))

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal of everything that determines the sequences."""
        template = [self.template.source, sorted(self.template.special_tokens.items())]
        tools = [list(self.tools)] if self.tools else []
        return sha256(json.dumps([self.tokenizer.fingerprint, template, self.train_on, *tools]).encode()).hexdigest()

    def close(self) -> None:
        self.template.close()


def _answered(prompt: list[int] | NapkinError, chats: Sequence[EncodedChat | NapkinError]) -> Answered | NapkinError:
    if isinstance(prompt, NapkinError):
        return prompt
    answers: list[list[int]] = []
    for chat in chats:
        if isinstance(chat, NapkinError):
            return chat
        if not chat.answers:
            return NapkinError("the chat template leaves out the answer: use another template")
        begin, end = chat.answers[-1]
        if chat.ids[:begin] != prompt:
            return NapkinError(
                "the chat template changes the messages before an answer once the answer follows: use another template"
            )
        answers.append(chat.ids[begin:end])
    return Answered(prompt, answers)


def _special_text(tokenizer: Tokenizer, token: int) -> str:
    text = next((text for text, each in tokenizer.special_tokens.items() if each == token), None)
    if text is None:
        raise NapkinError(f"token {token} is not a special token of the tokenizer: give a chat template")
    return text


def readable_parts(tokenizer: Tokenizer, sequence: TokenSequence) -> Iterator[tuple[str, bool, bool]]:
    """The text of a sequence in parts: what it shows, whether it is trained on, and whether it is special tokens.

    Characters that do not print are escapes. Where ordinary text is that of a special token, a backslash is before it.
    """
    special = set(tokenizer.special_tokens.values())
    pairs = zip(sequence.tokens.tolist(), sequence.loss_mask.tolist(), strict=True)
    for (is_trained_on, is_special), run in groupby(pairs, key=lambda pair: (pair[1], pair[0] in special)):
        shown = printable(b"".join(tokenizer.vocabulary[token] for token, _ in run))
        if not is_special:
            parts = split_at(shown, tokenizer.special_tokens)
            shown = "".join(f"\\{part}" if number % 2 else part for number, part in enumerate(parts))
        yield shown, is_trained_on, is_special


class LeftOut:
    """Counts what is left out by reason, with the first line of each; begins with what `by_reason` gave."""

    def __init__(self, by_reason: Mapping[str, tuple[int, int]] | None = None) -> None:
        kept = by_reason or {}
        self.counts = Counter({reason: n for reason, (n, _) in kept.items()})
        self.first_lines = {reason: line for reason, (_, line) in kept.items()}

    def add(self, line: int, reason: str) -> None:
        """Count a line; `reason` says what is wrong with it."""
        self.counts[reason] += 1
        self.first_lines.setdefault(reason, line)

    @property
    def n(self) -> int:
        return self.counts.total()

    @property
    def by_reason(self) -> dict[str, tuple[int, int]]:
        """The count of each reason, and its first line."""
        return {reason: (n, self.first_lines[reason]) for reason, n in self.counts.items()}

    def describe(self) -> str:
        """The reasons in one line, the most frequent first."""
        ordered = sorted(self.counts.items(), key=lambda each: (-each[1], self.first_lines[each[0]]))
        return ", ".join(f"{n:,} {reason} (line {self.first_lines[reason]:,})" for reason, n in ordered)
