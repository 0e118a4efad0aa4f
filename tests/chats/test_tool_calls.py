"""Calls in answers: found however the answer is cut, written back as they were, and text where anything is wrong."""

import json
import random
import re

import pytest

from napkin.chats.call_blocks import Block, Tag, TaggedText
from napkin.chats.call_notations import MOST_NESTED
from napkin.chats.tool_calls import (
    DEEPSEEK,
    DEEPSEEK_31,
    FUNCTION_GEMMA,
    GEMMA,
    GEMMA_4,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    OWN,
    CallForm,
    CallReader,
    Function,
    FunctionCall,
    call_form,
    is_nested_deeply,
)
from oracles import cut_answers
from oracles.cut_answers import NOW, PYTHON, WEATHER

ROME, PARIS = (FunctionCall("weather", {"city": city}) for city in ("Rome", "Paris é"))


def read(form: CallForm, answer: str, *, cuts: int = 0, most: int | None = None) -> tuple[str, list[FunctionCall]]:
    """What a reader finds in an answer that is cut so many times."""
    places = random.Random(cuts).choices(range(len(answer) + 1), k=cuts)
    return cut_answers.read(form, cut_answers.cut(answer, places), most=most)


def tagged(call: FunctionCall) -> str:
    return f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"


ANSWERS = {
    "one": (HERMES, tagged(ROME), "", [ROME]),
    "two, and words before": (HERMES, f"Let me see.\n{tagged(ROME)}\n{tagged(PARIS)}\n", "Let me see.", [ROME, PARIS]),
    "words between": (HERMES, f"A {tagged(ROME)} and\n{tagged(PARIS)} b\n", "A and b", [ROME, PARIS]),
    "no call": (HERMES, "  2 < 3, <tool_ is no tag \n", "  2 < 3, <tool_ is no tag \n", []),
    "another tag": (HERMES, "<python>1</python>", "<python>1</python>", []),
    "by name": (OWN, "See: <python>\nprint(1)\n</python>", "See:", [FunctionCall("python", {"code": "print(1)"})]),
    "not one text": (OWN, "<weather>Rome</weather>", "<weather>Rome</weather>", []),
    "own, in JSON": (OWN, tagged(ROME), "", [ROME]),
    "bare": (LLAMA, ' {"name": "weather", "parameters": {"city": "Rome"}}\n', "", [ROME]),
    "python tag": (LLAMA, '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    "bare text": (LLAMA, "Rome {is} fine. ", "Rome {is} fine. ", []),
    "bare and words": (LLAMA, '{"name": "now", "parameters": {}} is it', '{"name": "now", "parameters": {}} is it', []),
    "only white space": (LLAMA, " \n", " \n", []),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_calls_are_found_however_an_answer_is_cut_and_the_rest_is_its_text(case: str) -> None:
    form, answer, text, calls = ANSWERS[case]
    for cuts in range(30):
        assert read(form, answer, cuts=cuts) == (text, calls)


@pytest.mark.parametrize(
    "inner",
    [
        "", "{", "[]", "null", "weather", "NaN", '{"name": "weather"}', '{"name": "weather", "arguments": "Rome"}',
        '{"name": "rm", "arguments": {}}', '{"name": ["weather"], "arguments": {}}', '{"arguments": {}}',
        '{"name": "weather", "arguments": {"x": NaN}}', '{"name": "weather", "arguments": {"x": "\\ud800"}}',
        '{"name": "weather", "arguments": {"x": 1e999}}', '{"name": "weather", "arguments": {}} {}',
        '{"name": "weather", "arguments": {"a": ' + "[" * 10**5,
        '{"name": "weather", "arguments": {"a": ' + "[" * MOST_NESTED + "]" * MOST_NESTED + "}}",
        '{"name": "weather", "arguments": {"a": ' + "1" * 5000 + "}}",
    ],
)  # fmt: skip
def test_a_malformed_call_stays_text_and_those_beside_it_are_read(inner: str) -> None:
    wrong = f"<tool_call>{inner}</tool_call>"
    assert read(HERMES, f"{wrong}{tagged(ROME)}", cuts=5) == (wrong, [ROME])
    bare = inner.replace("arguments", "parameters") or "x"
    assert read(LLAMA, bare, cuts=5) == (bare, [])


def test_an_unfinished_call_is_text_and_a_call_that_ends_the_answer_is_the_last() -> None:
    half = tagged(ROME)[:-3]
    assert read(HERMES, f"Yes {half}", cuts=4) == (f"Yes {half}", [])
    assert read(HERMES, f"a {tagged(ROME)} b {tagged(PARIS)}", cuts=9, most=1) == ("a", [ROME])
    reader = CallReader(HERMES, [WEATHER], most=1)
    reader.push(tagged(ROME)[:-1])
    assert not reader.ended
    reader.push(">")
    assert reader.ended


def test_divided_texts_are_those_of_a_regular_expression() -> None:
    """Whatever stands in which order; the expression takes the square of the length where tags are not closed."""
    draw = random.Random(3)
    pieces = ["<a>", "</a>", "<bb>", "</bb>", "<", ">", "x", "<a", "</"]
    for _ in range(3000):
        text = "".join(draw.choices(pieces, k=draw.randrange(12)))
        expected = [(match[1], match[2]) for match in re.finditer(r"<(a|bb)>(.*?)</\1>", text, re.DOTALL)]
        divider, rest, found = TaggedText(map(Tag.named, ["a", "bb"])), text, list[str | Block]()
        while rest:
            size = draw.randrange(1, 4)
            found += divider.push(rest[:size])
            rest = rest[size:]
        found += divider.finish()
        assert [(each.name, each.content) for each in found if isinstance(each, Block)] == expected
        assert "".join(map(str, found)) == text
    long = "<a><bb>" * 200_000
    assert "".join(map(str, [*TaggedText(map(Tag.named, ["a", "bb"])).push(long)])) == ""
    divider = TaggedText(map(Tag.named, ["a", "bb"]))
    assert [*divider.push(long), *divider.finish()] == [long]


FORMS = {
    "hermes": HERMES, "llama": LLAMA, "own": OWN, "mistral": MISTRAL, "mistral args": MISTRAL_ARGS,
    "deepseek": DEEPSEEK, "deepseek 3.1": DEEPSEEK_31, "harmony": HARMONY, "functiongemma": FUNCTION_GEMMA,
    "gemma 4": GEMMA_4, "gemma": GEMMA,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (WEATHER, {"city": 'R"o\nme é', "days": [1, 2.5, None, True], "deep": {"a": {}}}),
        (PYTHON, {"code": "print('<b>')\nx = 1"}),
        (PYTHON, {"code": 5}),
        (NOW, {}),
    ],
)
def test_a_call_that_is_written_is_read_again_and_begins_as_it_must(
    form: CallForm, function: Function, arguments: dict[str, object]
) -> None:
    call = FunctionCall(function.name, arguments)
    written = form.write([call], {function.name: function})
    assert read(form, written, cuts=6) == ("", [call])
    if not (form.by_name and arguments == {"code": 5}):
        assert written.startswith(form.beginning(function))
    assert form.beginning(Function("x")).startswith(form.beginning(None))


def test_functions_of_one_text_are_known_by_their_schema() -> None:
    def of(parameters: object) -> Function:
        return Function.of({"type": "function", "function": {"name": "f", "parameters": parameters}})

    assert of({"type": "object", "properties": {"q": {"type": "string"}}}) == Function("f", "q")
    for other in ({}, {"properties": {}}, {"properties": {"q": {"type": "number"}}}, {"properties": [1]}):
        assert of(other) == Function("f")
    assert of({"properties": {"q": {"type": "string"}, "n": {"type": "string"}}}) == Function("f")
    assert of({"properties": {"q": "string"}}) == Function("f")
    assert Function.of({"function": {"name": "f"}}) == Function("f")


def test_forms_are_told_by_templates_and_unknown_ones_are_none() -> None:
    assert call_form("{{ m.content }}") == OWN
    assert call_form("<tool_call>\n{{ tool_calls }}") == HERMES
    assert call_form("ipython {{ tool_calls }} '\"parameters\": '") == LLAMA
    for other in ("<|tool_calls_section_begin|>", "<tool_call>\n<function=", "<tool_call><arg_key>", "<｜DSML｜"):
        assert call_form(other + "{{ m.tool_calls }}") is None


def test_depth_is_counted_without_recursion() -> None:
    value: object = 1
    for _ in range(MOST_NESTED):
        value = [value]
    assert not is_nested_deeply(value)
    assert is_nested_deeply({"a": value})
    for _ in range(10**5):
        value = {"a": value}
    assert is_nested_deeply(value)
    # Deallocated level by level: Python itself would not return from a hundred thousand frames.
    while isinstance(value, dict):
        value = value.popitem()[1]
