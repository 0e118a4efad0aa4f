"""The forms of Mistral, DeepSeek, gpt-oss and Gemma: as their publishers show them, however an answer is cut.

| form | source |
|---|---|
| Mistral | the templates of Mistral 7B 0.3 and Small 3.1, in vLLM's `examples/`; outputs in mlx-lm's issue 1374 |
| DeepSeek | the templates of V3, R1 and V3.1 on Hugging Face |
| gpt-oss | OpenAI's description of the harmony response format |
| FunctionGemma, Gemma 4 | ai.google.dev, "FunctionGemma formatting and best practices"; the template of Gemma 4 |
| Gemma 3 | ai.google.dev, "Function calling with Gemma": a list in Python's notation, or JSON |
"""

import json
import re
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napkin.chats.call_blocks import ChannelMessages
from napkin.chats.call_notations import MOST_NESTED, gemma_call, gemma_notation, python_calls
from napkin.chats.tool_calls import (
    DEEPSEEK,
    DEEPSEEK_31,
    FUNCTION_GEMMA,
    GEMMA,
    GEMMA_4,
    HARMONY,
    MISTRAL,
    MISTRAL_ARGS,
    OWN,
    CallForm,
    CallReader,
    FunctionCall,
    call_form,
)
from napkin.errors import NapkinError
from oracles.cut_answers import WEATHER, cut, read

ROME, PARIS, NOTHING = (
    FunctionCall("weather", {"city": "Rome"}),
    FunctionCall("weather", {"city": "Paris é", "days": [1, 2.5]}),
    FunctionCall("now", {}),
)
FORMS = {
    "mistral": MISTRAL, "mistral args": MISTRAL_ARGS, "deepseek": DEEPSEEK, "deepseek 3.1": DEEPSEEK_31,
    "harmony": HARMONY, "functiongemma": FUNCTION_GEMMA, "gemma 4": GEMMA_4, "gemma": GEMMA,
}  # fmt: skip
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
TO_WEATHER = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>I should ask.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>It is warm.<|return|>"
A_CALL = "<start_function_call>call:weather{city:<escape>Rome<escape>}<end_function_call>"
ANSWERS: dict[str, tuple[CallForm, str, str, list[FunctionCall]]] = {
    "mistral": (MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]', "", [ROME]),
    "mistral, ids": (
        MISTRAL,
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}, "id": "VvvODy9mT"}, '
        '{"arguments": {}, "name": "now", "id": "a b"}]',
        "",
        [FunctionCall("weather", {"city": "Rome"}, "VvvODy9mT"), NOTHING],
    ),
    "mistral, one id twice": (
        MISTRAL,
        'Hm. [TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "a"}, {"name": "now", "arguments": {}, "id": "a"}]',
        "Hm.",
        [FunctionCall("now", {}, "a"), NOTHING],
    ),
    "mistral, no list": (MISTRAL, 'Yes.\n[TOOL_CALLS]{"name": "now", "arguments": {}}\n', "Yes.", [NOTHING]),
    "mistral, marks in a text": (
        MISTRAL_ARGS,
        'A[TOOL_CALLS]python[ARGS]{"code": "[TOOL_CALLS] }\\"]"} B',
        "A B",
        [FunctionCall("python", {"code": '[TOOL_CALLS] }"]'})],
    ),
    "mistral args": (
        MISTRAL_ARGS, '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now[ARGS]{}', "", [ROME, NOTHING],
    ),
    "mistral args, id": (
        MISTRAL_ARGS,
        'Wait. [TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{"city": "Rome"}',
        "Wait.",
        [FunctionCall("weather", {"city": "Rome"}, "123456789")],
    ),
    "mistral args, left out": (MISTRAL_ARGS, 'So.\n[TOOL_CALLS]weather{"city": "Rome"}', "So.", [ROME]),
    "mistral args, cut": (MISTRAL_ARGS, "[TOOL_CALLS]weather[CALL_ID]12[AR", "[TOOL_CALLS]weather[CALL_ID]12[AR", []),
    "mistral, another function": (
        MISTRAL,
        'A [TOOL_CALLS] [{"name": "rm", "arguments": {}}] so',
        'A [TOOL_CALLS] [{"name": "rm", "arguments": {}}] so',
        [],
    ),
    "mistral, words": (MISTRAL, "[TOOL_CALLS] [TOOL_ is a mark", "[TOOL_CALLS] [TOOL_ is a mark", []),
    "mistral, two marks": (
        MISTRAL_ARGS, "[TOOL_CALLS]what? [TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]what?", [NOTHING],
    ),
    "deepseek": (DEEPSEEK, f"Let me see.\n\n{V3}", "Let me see.", [ROME, NOTHING]),
    "deepseek in 3.1's": (DEEPSEEK, V31, "", [ROME, NOTHING]),
    "deepseek 3.1": (DEEPSEEK_31, f"Let me see. {V31}", "Let me see.", [ROME, NOTHING]),
    "deepseek, one wrong": (
        DEEPSEEK_31,
        V31.replace('{"city": "Rome"}', "Rome"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>Rome<｜tool▁call▁end｜>",
        [NOTHING],
    ),
    "deepseek, no call": (DEEPSEEK, "a <｜tool▁calls▁begin｜> b", "a <｜tool▁calls▁begin｜> b", []),
    "deepseek, cut": (DEEPSEEK, V3[:-200], V3[:-200], []),
    "deepseek, thought": (DEEPSEEK, f"<think>\nHm.\n</think>\n\n{V3}", "<think>\nHm.\n</think>", [ROME, NOTHING]),
    "harmony": (HARMONY, TO_WEATHER, "", [ROME]),
    "harmony, in the role": (
        HARMONY,
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}',
        "",
        [ROME],
    ),
    "harmony, thought": (HARMONY, THOUGHT + TO_WEATHER, "I should ask.", [ROME]),
    "harmony, preamble": (
        HARMONY,
        f"<|channel|>commentary<|message|>I ask now.<|end|><|start|>assistant{TO_WEATHER}",
        "I ask now.",
        [ROME],
    ),
    "harmony, final": (HARMONY, THOUGHT + FINAL, "It is warm.", []),
    "harmony, preamble and final": (
        HARMONY,
        f"<|channel|>commentary<|message|>So.<|end|><|start|>assistant{FINAL}",
        "So.\n\nIt is warm.",
        [],
    ),
    "harmony, only a thought": (HARMONY, "<|channel|>analysis<|message|>I shou", "I shou", []),
    "harmony, plain": (HARMONY, " It is 2 < 3. ", " It is 2 < 3. ", []),
    "harmony, two": (HARMONY, f"{TO_WEATHER}<|start|>assistant{TO_WEATHER}", "", [ROME, ROME]),
    "harmony, not offered": (
        HARMONY, TO_WEATHER.replace("weather", "remove"), TO_WEATHER.replace("weather", "remove"), [],
    ),
    "harmony, cut": (HARMONY, TO_WEATHER[:-12], TO_WEATHER[:-12], []),
    "functiongemma": (FUNCTION_GEMMA, f"{A_CALL}<start_function_response>", "", [ROME]),
    "functiongemma, two": (
        FUNCTION_GEMMA,
        f"So: {A_CALL}<start_function_call>call:weather{{city:<escape>Paris é<escape>,days:[1,2.5]}}"
        "<end_function_call>",
        "So:",
        [ROME, PARIS],
    ),
    "functiongemma, values": (
        FUNCTION_GEMMA,
        "<start_function_call>call:weather{a:true,b:{c:null,<escape>d e<escape>:-1e3},f:[],g:Rome, "
        "h : <escape>,{[<escape>}<end_function_call>",
        "",
        [FunctionCall("weather", {"a": True, "b": {"c": None, "d e": -1000.0}, "f": [], "g": "Rome", "h": ",{["})],
    ),
    "functiongemma, wrong": (FUNCTION_GEMMA, A_CALL.replace("}", ""), A_CALL.replace("}", ""), []),
    "functiongemma, another mark": (FUNCTION_GEMMA, "<start_of <start_function", "<start_of <start_function", []),
    "gemma 4": (GEMMA_4, 'So. <|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|>', "So.", [ROME]),
    "gemma, a list": (GEMMA, "[weather(city='Rome'), now()]", "", [ROME, NOTHING]),
    "gemma, values": (
        GEMMA,
        '\n[weather(a=True, b=[None, -1.5, "\\u00e9\\x41\\d\\\'"], c={"d": {}}, e="")]\n',
        "",
        [FunctionCall("weather", {"a": True, "b": [None, -1.5, "éA\\d'"], "c": {"d": {}}, "e": ""})],
    ),
    "gemma, JSON": (GEMMA, '{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    "gemma, code": (GEMMA, 'I ask.\n```tool_code\nweather(city="Rome")\n```', "I ask.", [ROME]),
    "gemma, tuned here": (GEMMA, "<python>1</python>", "", [FunctionCall("python", {"code": "1"})]),
    "gemma, text": (GEMMA, "[weather] is (not) it", "[weather] is (not) it", []),
    "gemma, words behind": (GEMMA, "[now()] is it", "[now()] is it", []),
    "gemma, positional": (GEMMA, "[weather('Rome')]", "[weather('Rome')]", []),
    "gemma, code that is no call": (GEMMA, "```tool_code\n1 + 1\n``` ", "```tool_code\n1 + 1\n``` ", []),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
@settings(max_examples=15)
@given(places=st.lists(st.integers(0, 300)))
def test_a_published_answer_is_text_and_calls_however_it_is_cut(case: str, places: list[int]) -> None:
    form, answer, text, calls = ANSWERS[case]
    assert read(form, [answer]) == read(form, [*answer]) == (text, calls)
    assert read(form, cut(answer, places)) == (text, calls)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_character_of_a_call_is_told_as_text_and_text_is_told_at_once(form: CallForm) -> None:
    said = "It is 2 < 3 [and] so on, `a` too."
    answer = f"{said} {form.write([ROME], {})}"
    if form in (HARMONY, GEMMA):
        # Text is a message of its own, or calls are a whole answer.
        said = said if form is HARMONY else ""
        answer = f"<|channel|>final<|message|>{said}<|end|>{TO_WEATHER}" if said else form.write([ROME], {})
    reader, told = CallReader(form, [WEATHER]), ""
    begins = answer.index(said)
    for place, character in enumerate(answer):
        told += reader.push(character)[0]
        assert said.startswith(told)
        if begins <= place < begins + len(said) and character not in " <[`":
            assert told == said[: place - begins + 1]
    assert told + reader.finish()[0] == said
    assert reader.n_calls == 1
    # A text that only looks like a call at first waits no longer than until that is plain.
    for looks, rest in (("[TOOL_CALLS]", " a word"), ("<start_function", " is"), ("[we", "ek"), ("<|chan", " is")):
        reader = CallReader(form, [WEATHER])
        assert reader.push(looks)[0] + reader.push(rest)[0] == looks + rest


def test_what_a_model_makes_up_behind_its_calls_is_not_read() -> None:
    """The mark before what a function returns is a stop sequence, by FunctionGemma's documentation."""
    reader = CallReader(FUNCTION_GEMMA, [WEATHER])
    assert reader.push(f"{A_CALL}{A_CALL}") == ("", [ROME, ROME])
    assert not reader.ended
    assert reader.push(f"<start_function_response>response:weather{{}} and {A_CALL}") == ("", [])
    assert reader.ended
    alone = "<start_function_response> is a mark"
    assert read(FUNCTION_GEMMA, [*alone]) == (alone, [])


MALFORMED = [
    "", "{", "[]", "null", "Rome", "NaN", '"Rome"', "{]", '{"x": NaN}', '{"x": "\\ud800"}',
    '{"x": 1e999}', "{'x': 1}", '{"a": ' + "[" * 10**5, '{"a": ' + "[" * MOST_NESTED + "]" * MOST_NESTED + "}",
    "{" * 10**5 + "}" * 10**5,
]  # fmt: skip


@pytest.mark.parametrize("arguments", MALFORMED, ids=lambda each: each[:20])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_malformed_call_stays_text_to_the_letter(form: CallForm, arguments: str) -> None:
    sample = form.write([ROME], {})
    inner = {GEMMA: 'city="Rome"', FUNCTION_GEMMA: "{city:<escape>Rome<escape>}", GEMMA_4: '{city:<|"|>Rome<|"|>}'}
    answer = sample.replace(inner.get(form, '{"city": "Rome"}'), arguments or "x")
    assert answer != sample
    assert read(form, cut(answer, range(0, len(answer), 997))) == (answer, [])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_call_that_is_never_closed_is_text_of_bounded_memory_and_linear_work(form: CallForm) -> None:
    """A million characters, nested 100,000 deep and begun again and again; what is kept is a few times the answer."""
    begun = form.begin("weather")
    for filling in ('{"a": [', '"\\', begun):
        answer = begun + filling * (2**20 // len(filling))
        text, calls = read(form, cut(answer, range(0, len(answer), 64)))
        assert calls == []
        assert text == answer
    pieces = cut(begun + "x" * 2**15, range(0, 2**15, 5))
    tracemalloc.start()
    read(form, pieces)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A piece is an object of its own, of which the reader keeps a reference and an end: some 60 bytes for 5 characters.
    assert peak < 40 * 2**15


TAGS = ["<start_function_call>", "call:", "now", "{}", "{a:1}", "<end_function_call>", " ", "x", "<start_"]


@given(st.lists(st.sampled_from(TAGS), max_size=14), st.lists(st.integers(0, 120)))
def test_calls_between_tags_are_those_of_a_regular_expression(parts: list[str], places: list[int]) -> None:
    answer = "".join(parts)
    blocks = re.findall(r"<start_function_call>(.*?)<end_function_call>", answer, re.DOTALL)
    found = [re.fullmatch(r"\s*call:\s*now\s*\{\s*(a:1)?\s*\}\s*", each) for each in blocks]
    expected = [FunctionCall("now", {"a": 1} if each[1] else {}) for each in found if each]
    text, calls = read(FUNCTION_GEMMA, cut(answer, places))
    assert calls == expected
    if not calls:
        assert text == answer


MARKS = ["[TOOL_CALLS]", "now", "[ARGS]", "[CALL_ID]", "a1", " ", "{", "}", "{}", "[", "]", '"', "\\", ",", "x",
         '{"name": "now", "arguments": {}}']  # fmt: skip


@given(st.lists(st.sampled_from(MARKS), max_size=14), st.lists(st.integers(0, 200)))
def test_calls_behind_a_mark_are_those_of_a_plain_reading(parts: list[str], places: list[int]) -> None:
    """Beside Python's JSON decoder at each mark, from left to right."""
    answer, expected, place = "".join(parts), list[FunctionCall](), 0
    while (place := answer.find("[TOOL_CALLS]", place)) >= 0:
        place += len("[TOOL_CALLS]")
        head = re.compile(r"\s*(?:([\w.-]+)(?:\[CALL_ID\]([\w-]*))?(?:\[ARGS\]\s*)?(?=\{)|(?=[\[{]))").match(
            answer, place
        )
        if head is None:
            continue
        try:
            value, place = json.JSONDecoder().raw_decode(answer, head.end())
        except ValueError:
            ended = _balanced(answer, head.end())
            place = ended if ended >= 0 else len(answer)
            continue
        listed = [{"name": head[1], "arguments": value, "id": head[2]}] if head[1] else value
        listed = listed if isinstance(listed, list) else [listed]
        if all(isinstance(each, dict) and each.get("name") == "now" for each in listed):
            expected += [FunctionCall("now", each["arguments"], each.get("id") or None) for each in listed]
    text, calls = read(MISTRAL, cut(answer, places))
    seen: set[str] = set()
    for call in expected:
        call_id = call.id if call.id and re.fullmatch("[A-Za-z0-9_-]+", call.id) and call.id not in seen else None
        seen |= {call_id} if call_id else set()
        assert calls.pop(0) == FunctionCall(call.name, call.arguments, call_id)
    assert calls == []
    if not expected:
        assert text == answer


def _balanced(text: str, place: int) -> int:
    """Where brackets outside of texts are balanced; -1 if they never are."""
    depth, quoted = 0, False
    while place < len(text):
        character = text[place]
        place += 2 if quoted and character == "\\" else 1
        if character == '"':
            quoted = not quoted
        elif not quoted and character in "[]{}":
            depth += 1 if character in "[{" else -1
            if depth == 0:
                return place
    return -1


MESSAGES = ["<|start|>", "assistant", "<|channel|>", "analysis", "final", "commentary", " to=functions.now",
            "<|message|>", "{}", "x", "<|end|>", "<|call|>", " ", "<|"]  # fmt: skip


@given(st.lists(st.sampled_from(MESSAGES), max_size=20), st.lists(st.integers(0, 200)))
def test_messages_are_the_same_however_they_are_cut(parts: list[str], places: list[int]) -> None:
    answer = "".join(parts)
    assert read(HARMONY, cut(answer, places)) == read(HARMONY, [answer])
    divider = ChannelMessages()
    blocks = [each for piece in (*cut(answer, places),) for each in divider.push(piece)] + divider.finish()
    # Nothing is made up: each part stands in the answer, but for the blank line between two messages.
    assert all(str(each) in answer or str(each) == "\n\n" for each in blocks if "<" in str(each))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex("[a-z_]{1,8}", fullmatch=True), inner),
    max_leaves=8,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.from_regex("[a-z_]{1,8}", fullmatch=True), VALUES, max_size=4)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@settings(max_examples=20)
@given(given_arguments=st.lists(ARGUMENTS, min_size=1, max_size=3), size=st.integers(1, 40))
def test_calls_that_are_written_are_read_again(
    form: CallForm, given_arguments: list[dict[str, object]], size: int
) -> None:
    calls = [FunctionCall("weather", each) for each in given_arguments]
    written = form.write(calls, {})
    assert read(form, cut(written, range(0, len(written), size))) == ("", calls)
    if form.is_single:
        assert read(form, [written], most=1) == ("", calls[:1])
    else:
        assert read(form, [written], most=2) == ("", calls[:2])


def test_notations_refuse_what_is_no_value_and_what_is_too_deep() -> None:
    for wrong in (
        "", "[", "f", "f(", "f(1)", "f(x)", "f(x=)", "f(x=g())", "f(x=y)", "f(x=1", "[f()", "f() f()", "f(x='",
        "f(x='\n')", "f(x=b'1')", "f(x=(1,))", "f(x=1_000)", "f(x='\\ud800')", "f(x=" + "[" * 10**5,
        "f(x=" + "-" * 10**5 + "1)",         "f(x={1: 2})" + "x", "[f(),", "f(x=" + "[" * 101 + "]" * 101 + ")",
    ):  # fmt: skip
        with pytest.raises(NapkinError):
            python_calls(wrong)
    notation = gemma_notation("<escape>")
    for wrong in ("", "f{}", "call:f", "call:f{", "call:f{x}", "call:f{x:}", "call:f{x:<escape>}", "call:f{x:1}}",
                  "call:{}", "call:f{x:[}", "call:f{x:" + "[" * 10**5, "call:f{x:<escape>\ud800<escape>}"):  # fmt: skip
        with pytest.raises(NapkinError):
            gemma_call(wrong, notation)
    deep = "[" * (MOST_NESTED - 1) + "]" * (MOST_NESTED - 1)
    assert len(python_calls(f"f(x={deep})")) == 1
    assert gemma_call(f"call:f{{x:{deep}}}", notation)[0] == "f"


def test_forms_are_told_by_what_templates_write() -> None:
    turns = "{% for m in messages %}{{ m.tool_calls }}"
    for written, form in (
        ("[AVAILABLE_TOOLS][INST][/INST][TOOL_CALLS] [", MISTRAL),
        ("[INST][/INST][TOOL_CALLS]name[CALL_ID]id[ARGS]", MISTRAL_ARGS),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + '\\n```json", DEEPSEEK),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>", DEEPSEEK_31),
        ("<|start|>assistant to=functions.' + name + '<|channel|>commentary json<|message|>", HARMONY),
        ("<start_of_turn>model\n<start_function_call>call:", FUNCTION_GEMMA),
        ("<|turn>model\n<|tool_call>call:", GEMMA_4),
        ("<start_of_turn>model\n respond with [func_name1(params_name1=params_value1)]", GEMMA),
    ):
        assert call_form(written + turns) is form
    assert call_form("<start_of_turn>model\n{{ m.content }}") is GEMMA
    assert call_form("{{ m.content }}") is OWN
    assert call_form("<start_of_turn>model\n" + turns) is None
