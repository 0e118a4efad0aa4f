"""A conversation with a model in this process: what was said so far, and the next answer as it is made."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from napkin.chats.chat_format import Message, TemplateChat
from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.generation import TextStream
from napkin.inference.loaded_model import LoadedModel
from napkin.inference.requests import Request
from napkin.inference.settings import Sampling


class Conversation:
    """Keeps the messages. The engine shares what turns have in common, so that each token is computed once.

    Where the conversation has outgrown the model's context, its oldest messages are left out of what the model sees;
    `n_left_out` says how many of the last answer.
    """

    def __init__(
        self, opened: LoadedModel, *, system: str | None = None, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """`tools` are JSON schemas of what the model may call, which its template may describe to it.

        Raises NapkinError for tools where the model has no chat template.
        """
        self._opened = opened
        self._format = opened.chat_format
        if tools:
            if opened.chat_template is None:
                raise NapkinError(f"{opened.name} has no chat template, which turns of tools need: leave out --tools")
            self._format = TemplateChat(opened.tokenizer, opened.chat_template, tools)
        self._engine = Engine(opened.model, max_running=1)
        self._system = [] if system is None else [Message("system", system)]
        self._messages: list[Message] = []
        self._wanted = True
        self.n_left_out = 0

    def answer(self, text: str, sampling: Sampling, *, max_new_tokens: int = 512) -> Iterator[str]:
        """Yield the answer to a message in pieces of whole characters; `stop` ends it early, and what was said counts.

        Raises NapkinError for a message that does not fit the model's context.
        """
        return self.answer_to([Message("user", text)], sampling, max_new_tokens=max_new_tokens)

    def answer_to(self, messages: Sequence[Message], sampling: Sampling, *, max_new_tokens: int = 512) -> Iterator[str]:
        """`answer` to messages of any role, such as what the tools say that an answer has called."""
        self._wanted = True
        self._messages += messages
        try:
            ids = self._fitting()
        except NapkinError:
            del self._messages[len(self._messages) - len(messages) :]
            raise
        most = min(max_new_tokens, self._opened.model.config.context_length - len(ids))
        stop = (*sampling.stop, *self._format.stop)
        drawing = replace(sampling, stop=(), stop_ids=(*sampling.stop_ids, *self._opened.stop_ids))
        draws = self._engine.stream(Request(ids, most, drawing))
        stream, said = TextStream(self._opened.tokenizer, stop, at_start=True), ""
        with closing(draws):
            for drawn in draws:
                if piece := stream.push(drawn.token):
                    said += piece
                    yield piece
                if stream.stopped or not self._wanted:
                    break
        if rest := stream.finish():
            said += rest
            yield rest
        self._messages.append(Message("assistant", said))

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, without the system message."""
        return tuple(self._messages)

    @property
    def was_stopped(self) -> bool:
        """True if the last answer was ended by `stop`."""
        return not self._wanted

    def stop(self) -> None:
        """End the answer after the token that is being made; may be called by a signal's handler."""
        self._wanted = False

    def forget(self) -> None:
        """Begin again."""
        self._messages.clear()

    def _fitting(self) -> list[int]:
        """Tokens of the newest messages that leave room for an answer."""
        limit = self._opened.model.config.context_length
        for first in range(len(self._messages)):
            # A conversation begins with what the user said.
            if self._messages[first].role == "user":
                ids = self._format.encode([*self._system, *self._messages[first:]])
                if len(ids) < limit:
                    self.n_left_out = first
                    return ids
        raise NapkinError(f"the message does not fit the model's context of {limit:,} tokens: shorten it")
