"""Chat templates: the text that transformers renders, and templates that would hang, grow or look around."""

import gc
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from napkin.chats.chat_template import MOST_CHARACTERS, ChatTemplate, read_chat_template
from napkin.errors import CorruptFile, NapkinError
from peers import peer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' -}}
    {% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
HEADERS = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
INSTRUCTIONS = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate user and assistant") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {{- "[INST] " + (system + "\\n\\n" if loop.last and system is defined else "") }}
        {{- message["content"] + "[/INST]" }}
    {%- else %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
TURNS = """\
{{ bos_token }}{% for message in messages %}{% set role = 'model' if message.role == 'assistant' else message.role %}\
{{ '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
TOOLS = """\
{%- macro described(tool) %}{{ tool.function.name }}: {{ tool.function | tojson(indent=2) }}{% endmacro %}
{%- set ns = namespace(found=false) %}
{%- if tools %}{% for tool in tools %}{{ described(tool) }}{{ "\\n" }}{% endfor %}{% endif %}
{%- for message in messages if message.role != 'tool' %}
    {%- if message.content is string %}{{ message.role | upper }}: {{ message.content }}{% set ns.found = true %}
    {%- else %}{{ message | tojson }}{% endif %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
{{ "" }}
{% endfor %}
{% if ns.found %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}
"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "instructions": INSTRUCTIONS, "turns": TURNS, "tools": TOOLS}

CHAT = [
    {"role": "user", "content": "  Wie heißt der <Fuchs>? 🦊\n"},
    {"role": "assistant", "content": 'Reineke & "Isegrim"\'s Freund'},
    {"role": "user", "content": "{{ 7 * 7 }}"},
]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "größe": [1, 2.5, None]}}}


@pytest.mark.thorough
def test_templates_in_the_style_of_known_models_give_the_text_that_they_spell_out() -> None:
    def rendered(template: str, messages: list[dict[str, Any]] = CHAT, **more: Any) -> str:
        return ChatTemplate(template, TOKENS).render(messages, **more)

    first, second, third = (message["content"] for message in CHAT)
    assert rendered(CHATML) == (
        "<|im_start|>system\nBe helpful.<|im_end|>\n"
        f"<|im_start|>user\n{first}<|im_end|>\n<|im_start|>assistant\n{second}<|im_end|>\n"
        f"<|im_start|>user\n{third}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered(HEADERS, CHAT[:1], add_generation_prompt=False) == (
        f"<s><|start_header_id|>user<|end_header_id|>\n\n{first.strip()}<|eot_id|>"
    )
    assert rendered(INSTRUCTIONS, [{"role": "system", "content": "Short."}, *CHAT]) == (
        f"<s>[INST] {first}[/INST] {second}</s>[INST] Short.\n\n{third}[/INST]"
    )
    assert rendered(TURNS) == (
        f"<s><start_of_turn>user\n{first.strip()}<end_of_turn>\n<start_of_turn>model\n{second}<end_of_turn>\n"
        f"<start_of_turn>user\n{third}<end_of_turn>\n<start_of_turn>model\n"
    )
    described = f"weather: {json.dumps(TOOL['function'], ensure_ascii=False, indent=2)}\n"
    assert rendered(TOOLS, tools=[TOOL]).startswith(f"{described}USER: {first}")


@pytest.mark.peers
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_text_is_that_of_transformers(name: str, prompt: bool) -> None:
    chat_template_utils = peer("transformers.utils.chat_template_utils")
    for messages in (CHAT, CHAT[:1], [*CHAT[:2], {"role": "user", "content": "x"}]):
        for tools in (None, [TOOL]):
            (expected,), _ = chat_template_utils.render_jinja_template(
                [messages], tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=prompt, **TOKENS
            )
            actual = ChatTemplate(TEMPLATES[name], TOKENS).render(messages, tools=tools, add_generation_prompt=prompt)
            assert actual == expected


def test_a_date_can_be_asked_for() -> None:
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([])
    assert [len(part) for part in text.split("-") if part.isdigit()] == [4, 2, 2]


def refused(template: str, message: str, **settings: Any) -> None:
    with pytest.raises(NapkinError, match=message) as caught:
        ChatTemplate(template, TOKENS, **settings).render(CHAT)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "cannot be read: .*in line 1"),
        ("{{ raise_exception('no\nsystem') }}", "refuses the conversation: no"),
        ("{{ messages[0].nothing.deeper }}", "refuses .*no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include 'file:///etc/passwd' %}", "refuses"),
        ("{% import '/etc/passwd' as x %}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses .*unsafe"),
        ("{{ messages.__init__.__globals__ }}", "refuses"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses .*unsafe"),
        ("{{ '{0.__class__.__base__.__subclasses__}'.format(1) }}", "refuses .*unsafe"),
        ("{{ open('/etc/passwd') }}", "'open' is undefined"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "nested too deeply"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "cannot be read: it is nested too deeply"),
        ("{% for i in range(10**9) %}{% endfor %}", "refuses .*Range"),
        ("{{ 'x' * 10**10 }}", "memory"),
        ("{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "memory"),
        ("{{ '%9999999999d' % 1 }}", "refuses|memory"),
        ("{{ 'x'.ljust(10**10) }}", "memory"),
        ("{{ '{:>9999999999}'.format(1) }}", "refuses|memory"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "writes more than"),
        ("{{ 'x' * (2**24 + 1) }}", "writes more than"),
    ],
)
def test_a_template_that_fails_looks_around_or_grows_is_refused_in_one_line(template: str, message: str) -> None:
    refused(template, message, most_seconds=5.0)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 9**(9**9) }}",
        "{% set n = 9 %}{{ n**(n**n) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    ],
)
def test_a_template_that_does_not_end_is_ended(template: str) -> None:
    refused(template, "takes longer than 0.3 s", most_seconds=0.3)


def test_after_a_refusal_the_next_conversation_is_rendered() -> None:
    template = ChatTemplate(
        "{% set n = 9 %}{% if messages[0].content == 'hang' %}{{ n**(n**n) }}{% elif messages[0].content == 'grow' %}"
        "{{ 'x' * 10**11 }}{% endif %}{{ messages[0].content }}",
        most_seconds=1.0,
    )
    for content in ("a", "hang", "b", "grow", "c"):
        if len(content) == 1:
            assert template.render([{"role": "user", "content": content}]) == content
        else:
            with pytest.raises(NapkinError, match=r"longer|memory"):
                template.render([{"role": "user", "content": content}])


def test_several_threads_get_their_own_texts() -> None:
    template, texts = ChatTemplate("{{ messages[0].content }}"), {}

    def render(number: int) -> None:
        texts[number] = template.render([{"role": "user", "content": str(number) * 1000}])

    threads = [threading.Thread(target=render, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: str(number) * 1000 for number in range(20)}


def test_the_process_ends_with_the_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render(CHAT) == CHAT[0]["content"]
    process = template._process
    assert process is not None
    del template
    gc.collect()
    assert process.returncode is not None


def test_values_that_json_lacks_are_refused() -> None:
    with pytest.raises(NapkinError, match="what JSON cannot"):
        ChatTemplate("").render([{"role": "user", "content": object()}])


def folder_with(folder: Path, settings: Any, jinja: str | bytes | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if jinja is not None:
        (folder / "chat_template.jinja").write_bytes(jinja if isinstance(jinja, bytes) else jinja.encode())
    return folder


def test_a_folder_has_its_template_in_either_file_or_none(tmp_path: Path) -> None:
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "add_bos_token": True}
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}"}]
    for settings, jinja, expected in [
        ({**tokens, "chat_template": "{{ bos_token }}{{ eos_token }}"}, None, "<s></s>"),
        ({**tokens, "chat_template": "older"}, "{{ eos_token }}", "</s>"),
        ({**tokens, "chat_template": named}, None, "<s>"),
    ]:
        template = read_chat_template(folder_with(tmp_path / str(len(expected)), settings, jinja))
        assert template is not None
        assert template.render(CHAT) == expected
    assert read_chat_template(folder_with(tmp_path / "none", tokens)) is None
    assert read_chat_template(tmp_path) is None


@pytest.mark.parametrize(
    ("settings", "jinja", "message"),
    [
        ([], None, "is not a JSON object"),
        ({"chat_template": 7}, None, "not a text"),
        ({"chat_template": "x" * (MOST_CHARACTERS + 1)}, None, "characters: use one of"),
        ({}, "x" * (MOST_CHARACTERS + 1), "characters"),
        ({}, b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_a_damaged_template_file_is_refused(tmp_path: Path, settings: Any, jinja: Any, message: str) -> None:
    with pytest.raises((NapkinError, CorruptFile), match=message):
        read_chat_template(folder_with(tmp_path / "model", settings, jinja))


@pytest.mark.skipif(os.name == "nt", reason="links are not those of Windows")
def test_a_template_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = folder_with(tmp_path / "model", {})
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(NapkinError, match="outside of the folder"):
        read_chat_template(folder)
