"""Tasks put to a model that may call tools before it answers: `napkin evaluate task --tools`.

As in training, a turn with a call is followed by what the tool says and the next turn of the model; the first turn
without one is the answer, and so is the turn after the last call that is allowed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from napkin.chats.chat_format import Message, TemplateChat
from napkin.environments.tools import MOST_CALLS, Tool, calls_in, messages_of, tool_schemas
from napkin.errors import NapkinError
from napkin.inference.loaded_model import LoadedModel


class ToolAnswers:
    """A `napkin.evaluation.tasks.TaskModel` around another, whose answers to conversations may call tools.

    A conversation that has no more room in the model's context ends with the turn before. Raises NapkinError for a
    model without a chat template.
    """

    def __init__(self, model: LoadedModel, tools: Sequence[Tool], *, calls: int = MOST_CALLS) -> None:
        if model.chat_template is None:
            raise NapkinError(f"{model.name} has no chat template, which turns of tools need: leave out --tools")
        self._model, self._tools, self._calls = model, tuple(tools), calls
        self._format = TemplateChat(model.tokenizer, model.chat_template, tool_schemas(tools))
        self._conversations: dict[tuple[int, ...], list[Message]] = {}
        self.context_length, self.start_ids, self.document_ids = (
            model.context_length,
            model.start_ids,
            model.document_ids,
        )

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The ids of a conversation of (role, content), with the tools where the template describes them."""
        conversation = [Message(role, content) for role, content in messages]
        ids = self._format.encode(conversation)
        self._conversations[tuple(ids)] = conversation
        return ids

    def logprobs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        return self._model.logprobs(pairs)

    def complete(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: Sequence[str]
    ) -> Iterator[tuple[int, str]]:
        """Yield the last turn of the greedy answer to each prompt, with the prompt's number, as answers finish. A
        prompt that was not made by `encode_chat`, such as one that lost its beginning, is answered without tools.
        Raises NapkinError where a tool gives no output.
        """
        asked = {number: tuple(prompt) for number, prompt in enumerate(prompts)}
        said = {number: self._conversations.get(ids) for number, ids in asked.items()}
        left = {number: 0 if conversation is None else self._calls for number, conversation in said.items()}
        while asked:
            numbers, again = list(asked), dict[int, tuple[int, ...]]()
            for place, text in self._model.complete([asked[each] for each in numbers], max_new_tokens, stop):
                number = numbers[place]
                conversation = said[number]
                calls = calls_in(text, self._tools)[: left[number]]
                if conversation is not None and calls:
                    left[number] -= len(calls)
                    said[number] = longer = [*conversation, Message("assistant", text), *messages_of(calls)]
                    ids = tuple(self._format.encode(longer))
                    if len(ids) + max_new_tokens <= self.context_length:
                        again[number] = ids
                        continue
                yield number, text
            asked = again

    def about(self) -> dict[str, Any]:
        """The model's marks, and the names of the tools."""
        return {**self._model.about(), "tools": sorted(each.name for each in self._tools)}
