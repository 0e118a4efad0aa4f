"""A conversation with calls, through a template of each family and back: the same calls, whatever they are named.

The templates are small ones of our own, which write turns and calls where the published ones do. Sources: those of
`test_published_call_forms.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from napkin.chats.chat_template import ChatTemplate
from napkin.chats.tool_calls import CallReader, FunctionCall
from napkin.inference.generation import TextStream
from napkin.inference.loaded_model import LoadedModel
from napkin.model.config import ModelConfig
from napkin.serving.request_body import ChatBody, read_body
from napkin.serving.tools import ToolTurns
from napkin.tokenizer.bpe import ByteTokenizer

_MISTRAL = """
{%- for m in messages -%}
  {%- if m.role == 'user' -%} [INST]{{ m.content }}[/INST]
  {%- elif m.role == 'tool' -%} [TOOL_RESULTS]{{ m.tool_call_id }}{{ m.content }}[/TOOL_RESULTS]
  {%- else -%} {{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}</s>
  {%- endif -%}
{%- endfor -%}"""
_DEEPSEEK = """
{%- for m in messages -%}
  {%- if m.role == 'user' -%} <｜User｜>{{ m.content }}
  {%- elif m.role == 'tool' -%} <｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
  {%- else -%} <｜Assistant｜>{{ m.content }}
    {%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}CALL{% endfor %}
      {{- '<｜tool▁calls▁end｜>' }}
    {%- endif -%} <｜end▁of▁sentence｜>
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%} <｜Assistant｜> {%- endif -%}"""
_DEEPSEEK_CALL = "{{ '<｜tool▁call▁begin｜>' + WHAT + '<｜tool▁call▁end｜>' }}"
_GEMMA = """
{%- for m in messages -%}
  {%- if m.role == 'tool' -%} {{ m.content }}
  {%- else -%} <start_of_turn>{{ ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content }}
    {%- for c in m.tool_calls or [] %}CALL{% endfor -%} {{ '<end_of_turn>\\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}"""
_VALUE = """
{%- macro value(v) -%}
  {%- if v is string -%} {{ 'MARK' + v + 'MARK' }}
  {%- elif v is mapping -%} {{ '{' }}{% for k, e in v.items() %}{{ k }}:{{ value(e) }}
    {{- '' if loop.last else ',' }}{% endfor %}{{ '}' }}
  {%- elif v is boolean -%} {{ 'true' if v else 'false' }}
  {%- elif v is iterable -%} [ {%- for e in v %}{{ value(e) }}{{ '' if loop.last else ',' }}{% endfor -%} ]
  {%- else -%} {{ v }}
  {%- endif -%}
{%- endmacro -%}"""


def _gemma_functions(opens: str, closes: str, mark: str) -> str:
    call = f"{opens}call:{{{{ c.function.name + value(c.function.arguments) }}}}{closes}"
    return _VALUE.replace("MARK", mark) + _GEMMA.replace("CALL", call)


TEMPLATES = {
    "mistral": _MISTRAL.replace(
        "CALL",
        """{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
        {{- '[TOOL_CALLS] [' if loop.first }}{{ (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' }}
        {{- ']' if loop.last else ', ' }}""",
    ),
    "mistral args": _MISTRAL.replace(
        "CALL", "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
    ),
    "deepseek": _DEEPSEEK.replace(
        "CALL",
        _DEEPSEEK_CALL.replace(
            "WHAT", r"""'function<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```'"""
        ),
    ),
    "deepseek 3.1": _DEEPSEEK.replace(
        "CALL", _DEEPSEEK_CALL.replace("WHAT", "c.function.name + '<｜tool▁sep｜>' + c.function.arguments")
    ),
    "deepseek, JSON by the template": _DEEPSEEK.replace(
        "CALL",
        _DEEPSEEK_CALL.replace("WHAT", "c.function.name + '<｜tool▁sep｜>' + (c['function']['arguments'] | tojson)"),
    ),
    "harmony": """
{%- for m in messages -%}
  {%- if m.role == 'user' -%} <|start|>user<|message|>{{ m.content }}<|end|>
  {%- elif m.role == 'tool' -%} <|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>
    {{- m.content | tojson }}<|end|>
  {%- elif m.tool_calls -%}
    {%- if m.content -%} <|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|> {%- endif -%}
    {%- set call = m.tool_calls[0].function -%}
    <|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}
    {{- '<|call|>' }}
  {%- else -%} <|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%} <|start|>assistant {%- endif -%}""",
    "functiongemma": _gemma_functions("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma 4": _gemma_functions("<|tool_call>", "<tool_call|>", '<|"|>'),
    "gemma, python": "{# answer with [func_name1(params_name1=params_value1)] #}"
    + _GEMMA.replace(
        "CALL",
        """{{ '[' if loop.first }}{{ c.function.name }}(
        {%- for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}
        {%- endfor %}){{ ']' if loop.last else ', ' }}""",
    ),
    "gemma, says nothing": _GEMMA.replace("{%- for c in m.tool_calls or [] %}CALL{% endfor -%}", ""),
}
BEHIND = {
    "mistral": ' {"city": "Rome"}}]',
    "mistral args": '{"city": "Rome"}',
    "deepseek": '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek 3.1": '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek, JSON by the template": '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "harmony": '{"city": "Rome"}',
    "functiongemma": "city:<escape>Rome<escape>}<end_function_call>",
    "gemma 4": 'city:<|"|>Rome<|"|>}<tool_call|>',
    "gemma, python": "city='Rome')]",
    "gemma, says nothing": "city='Rome')]",
}
"""What follows where an answer has to call `weather`."""
ENDS = ("</s>", "<｜end▁of▁sentence｜>", "<|call|>", "<end_of_turn>")
SPECIAL = [
    "<|endoftext|>", *ENDS, "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<start_of_turn>", "<start_function_call>",
    "<end_function_call>", "<escape>", "<|tool_call>", "<tool_call|>", '<|"|>',
]  # fmt: skip
TOKENIZER = ByteTokenizer(SPECIAL)
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Zürich <b> 'a' [TOOL_CALLS] <s>", "days": [1, 2.5, True], "deep": {"a": {"b": "c,}"}}},
    {"text": 'line\n"quoted" \\ back'},
]


def turns(template: str, messages: list[dict[str, Any]], folder: Path, *, source: str = "", **fields: Any) -> ToolTurns:
    config = ModelConfig(TOKENIZER.vocab_size, 64, d_model=16, n_layers=1, n_heads=2)
    opened = LoadedModel(folder, "tiny", config, TOKENIZER, (), (), ChatTemplate(source or TEMPLATES[template], {}))
    tools = [{"type": "function", "function": {"name": name}} for name in ("weather", "weather_now")]
    return ToolTurns(opened, read_body(json.dumps({"messages": messages, "tools": tools, **fields}).encode(), ChatBody))


def called(*calls: tuple[str, str, dict[str, Any]]) -> list[dict[str, Any]]:
    functions = [(id, {"name": name, "arguments": json.dumps(each)}) for id, name, each in calls]
    return [
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": id, "function": each} for id, each in functions]},
        *({"role": "tool", "content": f"{id}?", "tool_call_id": id} for id, _ in functions),
    ]


def found_in(reader: CallReader | None, ids: list[int]) -> tuple[str, list[FunctionCall]]:
    """What is read of an answer's tokens, one at a time."""
    assert reader is not None
    stream = TextStream(TOKENIZER)
    found = [reader.push(stream.push(each)) for each in ids]
    found += [reader.push(stream.finish()), reader.finish()]
    return "".join(text for text, _ in found), [call for _, calls in found for call in calls]


@pytest.mark.parametrize("template", TEMPLATES)
def test_calls_that_a_template_writes_are_read_again(template: str, tmp_path: Path) -> None:
    n_calls = 1 if template == "harmony" else 2
    names = ["weather", "weather_now"][:n_calls]
    messages = called(*(("123456789"[:9], name, each) if n_calls == 1 else (f"call_{name}", name, each)
                        for name, each in zip(names, ARGUMENTS, strict=False)))  # fmt: skip
    asked, told = (turns(template, messages[:n], tmp_path) for n in (1, len(messages)))
    prompt, whole = asked.encode(), told.encode()
    assert whole[: len(prompt)] == prompt
    ends = {TOKENIZER.special_tokens[each] for each in ENDS}
    length = next(i for i, each in enumerate(whole[len(prompt) :]) if each in ends)
    text, calls = found_in(asked.reader(), whole[len(prompt) : len(prompt) + length])
    assert text == ""
    assert [(each.name, each.arguments) for each in calls] == [*zip(names, ARGUMENTS[:n_calls], strict=True)]
    if template == "mistral":
        # Ids of nine letters and digits, whatever a client named its calls, and the same in the answers of tools.
        assert all(each.id is not None and each.id.isalnum() and len(each.id) == 9 for each in calls)
        behind = TOKENIZER.decode(whole[len(prompt) + length :])
        assert [behind.index(f"[TOOL_RESULTS]{each.id}") for each in calls]


def test_calls_at_once_come_one_after_the_other_where_a_message_has_one(tmp_path: Path) -> None:
    """gpt-oss's template writes the first call of a message only: another model's client may have made more."""
    at_once = called(("a", "weather", {}), ("b", "weather_now", {"x": 1}))
    at_once[1]["content"] = "I ask."
    at_once[2:] = at_once[:1:-1]
    text = TOKENIZER.decode(turns("harmony", at_once, tmp_path).encode())
    places = [
        text.index(each) for each in ("I ask.", "to=functions.weather<", '"a?"', "to=functions.weather_now<", '"b?"')
    ]
    assert places == sorted(places)
    assert text.count("<|call|>") == 2


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_answer_that_has_to_call_begins_as_a_call_of_single_tokens(template: str, tmp_path: Path) -> None:
    chosen = {"type": "function", "function": {"name": "weather"}}
    said = [{"role": "user", "content": "How warm?"}]
    free, forced = turns(template, said, tmp_path), turns(template, said, tmp_path, tool_choice=chosen)
    prompt, begun = free.encode(), forced.encode()
    assert begun[: len(prompt)] == prompt
    tokens = begun[len(prompt) :]
    assert TOKENIZER.decode(tokens) == forced.begun
    # No mark of the form is written as text.
    marks = {TOKENIZER.special_tokens[each] for each in SPECIAL if each in forced.begun}
    assert marks == {*tokens} & {*TOKENIZER.special_tokens.values()}
    rome = FunctionCall("weather", {"city": "Rome"})
    assert found_in(forced.reader(), TOKENIZER.encode(BEHIND[template])) == ("", [rome])
    assert found_in(forced.reader(), TOKENIZER.encode(" I will not.")) == (f"{forced.begun} I will not.", [])
    required = turns(template, said, tmp_path, tool_choice="required")
    assert required.encode()[: len(prompt)] == prompt
    assert forced.begun.startswith(required.begun)


def test_a_call_that_has_to_come_ends_the_thought_that_a_prompt_begins(tmp_path: Path) -> None:
    """As the prompts of DeepSeek R1 do."""
    said = [{"role": "user", "content": "How warm?"}]
    source, asks = TEMPLATES["deepseek"], "{%- if add_generation_prompt -%} <｜Assistant｜> {%- endif -%}"
    thinking = source.replace(asks, asks.replace("<｜Assistant｜>", "{{ '<｜Assistant｜><think>\\n' }}"))
    assert thinking != source
    text = TOKENIZER.decode(turns("deepseek", said, tmp_path, source=thinking, tool_choice="required").encode())
    assert text.endswith(
        "<｜Assistant｜><think>\n\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    )
    assert TOKENIZER.decode(turns("deepseek", said, tmp_path, source=thinking).encode()).endswith("<think>\n")
