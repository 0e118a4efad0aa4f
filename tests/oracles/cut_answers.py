"""Answers of models that come in pieces, and what a reader finds in them."""

from collections.abc import Sequence

from napkin.chats.tool_calls import CallForm, CallReader, Function, FunctionCall

WEATHER, PYTHON, NOW = Function("weather"), Function("python", "code"), Function("now")


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The pieces of a text between places, of which those behind its end are its end."""
    ends = sorted(min(each, len(text)) for each in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def read(form: CallForm, pieces: Sequence[str], *, most: int | None = None) -> tuple[str, list[FunctionCall]]:
    """The text and the calls of an answer in pieces, where WEATHER, PYTHON and NOW may be called."""
    reader = CallReader(form, [WEATHER, PYTHON, NOW], most=most)
    found = [*map(reader.push, pieces), reader.finish()]
    return "".join(text for text, _ in found), [call for _, calls in found for call in calls]
