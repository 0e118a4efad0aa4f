"""Tools of a conversation: their description for the model's chat template, and the reading of its answers. The server
runs nothing: calls in an answer are sent to the client, which replies with messages of role `tool`.
"""

import hashlib
import re
from typing import Any

import msgspec

from napkin.chats.call_notations import MOST_NESTED
from napkin.chats.chat_format import TemplateChat
from napkin.chats.tool_calls import OWN, CallReader, Function, FunctionCall, call_form, is_nested_deeply
from napkin.errors import first_line
from napkin.inference.loaded_model import LoadedModel
from napkin.serving.request_body import ApiError, CallBody, ChatBody, ChosenTool, MessageBody

_LAST_TOKENS = 16
"""Tokens that hold the last tag of a prompt, which may be text to the tokenizer."""


def can_call_tools(opened: LoadedModel) -> bool:
    """True if calls in the model's answers can be read."""
    return opened.chat_template is not None and call_form(opened.chat_template.source) is not None


class ToolTurns:
    """A conversation in which functions are offered, called or answered.

    Raises ApiError for a model without a chat template, and for functions that are offered to one whose template
    writes calls in a form that is not known.
    """

    def __init__(self, opened: LoadedModel, body: ChatBody) -> None:
        if opened.chat_template is None or not isinstance(opened.chat_format, TemplateChat):
            raise ApiError(400, f"{opened.name} has no chat template, which tools need: leave them out", field="tools")
        form = call_form(opened.chat_template.source)
        if body.offered and form is None:
            message = f"the chat template of {opened.name} writes calls in a form that is not known: leave out tools"
            raise ApiError(400, message, field="tools")
        self._body, self._tokenizer, self._form = body, opened.tokenizer, form or OWN
        source = opened.chat_template.source
        self._writes_calls = "tool_calls" in source
        # Some templates join arguments to other texts, and some have been changed to write them as JSON themselves.
        self._wants_json = self._form.takes_json and re.search(r"arguments\W*\|\s*tojson", source) is None
        schemas = [msgspec.to_builtins(each) for each in body.offered]
        self._format = opened.chat_format.with_tools(schemas)
        offered = [Function.of(each) for each in schemas]
        self._functions = {each.name: each for each in offered}
        choice = body.tool_choice
        self.begun = ""
        """The text that the answer has to begin with."""
        if isinstance(choice, ChosenTool):
            offered = [self._functions[choice.function.name]]
        self._callable = offered
        if isinstance(choice, ChosenTool) or choice == "required":
            self.begun = self._form.beginning(offered[0] if len(offered) == 1 else None)
        is_one = self._form.is_single or isinstance(choice, ChosenTool) or not body.parallel_tool_calls
        self._most = 1 if is_one else None

    @property
    def n_characters(self) -> int:
        """Characters of the functions' descriptions and of calls."""
        calls = [call.function for each in self._body.messages for call in each.calls]
        n_called = sum(len(each.name) + len(each.arguments) for each in calls)
        return n_called + len(msgspec.json.encode(self._body.offered))

    def encode(self) -> list[int]:
        """The tokens up to where the answer begins, or continues after a given beginning.

        Raises ApiError for arguments that are not JSON objects, NapkinError for messages that the template refuses.
        """
        ids = self._format.encode_fields(self._messages())
        begun = self.begun
        if begun and self._tokenizer.decode(ids[-_LAST_TOKENS:]).rstrip().endswith("<think>"):
            # Templates such as DeepSeek R1's begin a thought in the prompt, and calls are written behind it.
            begun = f"\n</think>\n\n{begun}"
        named = {f"<{each}>" for each in self._functions}
        tags = {*self._form.marks, "</think>", *named} & self._tokenizer.special_tokens.keys()
        return [*ids, *self._tokenizer.encode(begun, allowed_special=tags)]

    def reader(self) -> CallReader | None:
        """Divides an answer into text and calls; None if nothing may be called."""
        if not self._callable:
            return None
        reader = CallReader(self._form, self._callable, most=self._most)
        reader.push(self.begun)
        return reader

    def _messages(self) -> list[dict[str, Any]]:
        """The messages in the fields of chat templates; answers of tools are in the order of their calls."""
        messages: list[dict[str, Any]] = []
        called: dict[str, CallBody] = {}
        answers: dict[str, dict[str, Any]] = {}
        for place, each in enumerate(self._body.messages):
            fields = {"role": each.role, "content": each.text(place)}
            call = called.get(each.tool_call_id) if each.role == "tool" else None
            if call is not None:
                answers[call.id] = {**fields, "tool_call_id": self._id(call), "name": call.function.name}
                if len(answers) == len(called):
                    said = messages.pop()
                    messages += self._answered(said, [answers[name] for name in called])
                continue
            if each.calls:
                called, answers = {call.id: call for call in each.calls}, {}
                fields |= self._called(place, each, fields["content"])
            messages.append(fields)
        return messages

    def _answered(self, said: dict[str, Any], answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A message with calls, and the answers to them; one after the other where a message has one call."""
        if not self._form.is_single or "tool_calls" not in said:
            return [said, *answers]
        calls = [{**said, "content": "", "tool_calls": [each]} for each in said["tool_calls"]]
        calls[0]["content"] = said["content"]
        return [each for pair in zip(calls, answers, strict=True) for each in pair]

    def _called(self, place: int, message: MessageBody, text: str) -> dict[str, Any]:
        """The calls of a message as a field, or in its text where the template knows no such field."""
        calls = [_call(place, each) for each in message.calls]
        if not self._writes_calls:
            written = self._form.write(calls, self._functions)
            return {"content": f"{text}\n{written}" if text else written}
        told = [
            {"name": each.name, "arguments": each.arguments_json if self._wants_json else each.arguments}
            for each in calls
        ]
        pairs = zip(message.calls, told, strict=True)
        return {"tool_calls": [{"id": self._id(call), "type": call.type, "function": each} for call, each in pairs]}

    def _id(self, call: CallBody) -> str:
        """The id of a call as the template wants it: another client may have named it otherwise."""
        length = self._form.id_length
        if length is None or re.fullmatch(f"[A-Za-z0-9]{{{length}}}", call.id):
            return call.id
        return hashlib.sha256(call.id.encode()).hexdigest()[:length]


def _call(place: int, call: CallBody) -> FunctionCall:
    name = call.function.name
    try:
        arguments = msgspec.json.decode(call.function.arguments)
    except (msgspec.MsgspecError, RecursionError) as error:
        message = f"messages[{place}] calls '{name[:100]}' with arguments that are not JSON: {first_line(error)}"
        raise ApiError(400, message, field="messages") from None
    if not isinstance(arguments, dict) or is_nested_deeply(arguments):
        message = f"messages[{place}] calls '{name[:100]}' with arguments that are not a JSON object"
        raise ApiError(400, f"{message} of at most {MOST_NESTED} levels", field="messages")
    return FunctionCall(name, arguments)


def uses_tools(body: ChatBody) -> bool:
    """True for a conversation that `ToolTurns` encodes."""
    return bool(body.offered) or any(each.calls for each in body.messages)
