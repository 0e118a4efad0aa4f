"""Published chat templates, as TRL has them: ids and masks beside those of transformers, or a line says why not."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from napkin.chats.chat_format import Message, TemplateChat, UnstableTemplate
from napkin.chats.chat_template import ChatTemplate, RefusedConversation
from napkin.chats.tool_calls import CallReader, Function, FunctionCall, call_form
from napkin.environments.tools import tool_schemas, tools_named
from napkin.inference.loaded_model import LoadedModel
from napkin.model.config import ModelConfig
from napkin.serving.request_body import ApiError, ChatBody, read_body
from napkin.serving.tools import ToolTurns
from napkin.tokenizer.interchange.huggingface import read_huggingface
from peers import peer

pytestmark = pytest.mark.peers

TEMPLATES = [
    "llama3", "llama3_2", "qwen2_5", "qwen3", "gemma", "gemma3", "phi3", "phi3_5", "deepseekv3", "deepseek_r1_distill",
    "gptoss", "glm4moe",
]  # fmt: skip
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
TAGS = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"}
THOUGHT = "<think>\nIt is late.\n</think>\n\nGood night."
CHATS = {
    "an answer": [("user", "Hi there"), ("assistant", "Hello.")],
    "two": [("user", "Hi there"), ("assistant", "Hello."), ("user", "Hello."), ("assistant", "Hello.\n")],
    "system": [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes.")],
    "thought": [("user", "Hi there"), ("assistant", THOUGHT)],
    "thought in a field": [("user", "Hi"), ("assistant", "Good night.")],
    "thought before": [("user", "Hi"), ("assistant", THOUGHT), ("user", "More"), ("assistant", "No.")],
    "tool": [("user", "Add"), ("assistant", "Let me see."), ("tool", "5"), ("assistant", "It is 5.")],
}
compared: set[str] = set()
# What a template leaves out of the text, or asks by and does not write.
CANNOT = {
    ("qwen3", "thought before"),
    ("glm4moe", "thought before"),
    *((name, "thought in a field") for name in TEMPLATES if name not in ("qwen3", "glm4moe", "gptoss")),
    *(("deepseekv3", name) for name in CHATS),
    *(("deepseek_r1_distill", name) for name in CHATS),
}


def both(template: str, folder: Path) -> tuple[Any, TemplateChat]:
    """The tokenizer of transformers, and napkin's format with the same one: bytes, and what the template names."""
    transformers, trl = peer("transformers"), peer("trl")
    source = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text("utf-8")
    names = {*re.findall(r"<[|｜][^'\"<>{}\s]+[|｜]>|<(?:start|end)_of_turn>", source), "<s>", "</s>", *TAGS}
    made: Any = tokenizers.Tokenizer(
        tokenizers.models.BPE({each: i for i, each in enumerate(tokenizers.pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    for name in sorted(names):
        made.add_tokens([tokenizers.AddedToken(name, special=name not in TAGS, normalized=False)])
    made.save(str(folder / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **VARIABLES)
    theirs.chat_template = source
    ours = TemplateChat(read_huggingface(folder / "tokenizer.json"), ChatTemplate(source, VARIABLES))
    return theirs, ours


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_ids_and_masks_are_those_of_transformers_or_a_line_says_why_not(
    template: str, chat: str, tmp_path: Path
) -> None:
    theirs, ours = both(template, tmp_path)
    thoughts = {"reasoning_content": "It is late."} if template in ("qwen3", "glm4moe") else {"thinking": "It is late."}
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in CHATS[chat]]
    messages[-1] |= thoughts if chat == "thought in a field" else {}
    said = [Message(each["role"], each["content"], tuple(thoughts.items()) * (len(each) > 2)) for each in messages]
    try:
        expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    except peer("jinja2").TemplateError:
        expected = None
    if expected is None or (template, chat) in CANNOT:
        with pytest.raises(UnstableTemplate if expected else RefusedConversation) as caught:
            ours.encode_answers(said)
        assert "\n" not in str(caught.value)
        return
    found = ours.encode_answers(said)
    assert found.ids == expected
    for turn in (number for number, each in enumerate(messages) if each["role"] == "assistant"):
        asked = theirs.apply_chat_template(
            messages[:turn], tokenize=True, return_dict=False, add_generation_prompt=True
        )
        assert ours.encode_fields(messages[:turn]) == asked
    # TRL's form of the same template marks what is learned, headers and what stands behind an end with it.
    marked = Path(peer("trl").__file__).parent / "chat_templates" / f"{template}_training.jinja"
    if marked.exists():
        theirs.chat_template = marked.read_text("utf-8")
        told = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        if told["input_ids"] == found.ids:
            learned = {i for begin, end in found.answers for i in range(begin, end)}
            marked_too = {i for i, counts in enumerate(told["assistant_masks"]) if counts}
            assert learned <= marked_too
            rest = theirs.decode([found.ids[i] for i in sorted(marked_too - learned)])
            assert re.fullmatch(r"(\s|</s>|<\|start\|>assistant|<\|end\|>|<｜Assistant｜>)*", rest)
            compared.add(template)


def test_masks_were_compared(tmp_path: Path) -> None:
    for template in TEMPLATES:
        test_ids_and_masks_are_those_of_transformers_or_a_line_says_why_not(template, "an answer", tmp_path)
    assert compared >= {"llama3", "qwen2_5", "qwen3", "gemma", "gemma3", "phi3", "phi3_5", "gptoss"}


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3"])
def test_tools_are_described_and_answered_as_transformers_renders_them(template: str, tmp_path: Path) -> None:
    """The form of Hermes; two calls in a turn, and a tool's output of several lines."""
    theirs, ours = both(template, tmp_path)
    tools = tool_schemas(tools_named("python,calculator"))
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+3"}}\n</tool_call>'
    messages = [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": f"{call}\n{call}"},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "5\n<b>"},
        {"role": "assistant", "content": "It is 5."},
    ]
    said = [Message(each["role"], each["content"]) for each in messages]
    chat = TemplateChat(ours._tokenizer, ours._template, tools)  # pyright: ignore[reportPrivateUsage]
    for n in (2, 5):
        expected = theirs.apply_chat_template(
            messages[:n], tools=tools, tokenize=True, return_dict=False, add_generation_prompt=True
        )
        assert chat.encode(said[:n]) == expected
    # The same ids as where a call is a field of the message, by which other programs give it to the template.
    function = {"name": "calculator", "arguments": {"expression": "2+3"}}
    fields = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}] * 2}
    as_fields = [*messages[:2], fields, *messages[3:5]]
    assert chat.encode(said[:5]) == theirs.apply_chat_template(
        as_fields, tools=tools, tokenize=True, return_dict=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    "template", ["qwen2_5", "qwen3", "llama3_1", "llama3_2", "deepseekv3", "gptoss", "gemma4", "gemma4_v5"]
)
def test_calls_of_a_client_are_rendered_as_transformers_renders_them_and_read_again(
    template: str, tmp_path: Path
) -> None:
    """What `napkin serve` makes of a request with tools, and that the call which the template writes is found."""
    theirs, ours = both(template, tmp_path)
    weather = {"name": "weather", "description": "It is <warm>.", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": weather}]
    arguments = {"city": "Zürich", "days": [1, 2.5, None], "deep": {"a": True}}
    function = {"name": "weather", "arguments": arguments}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "content": "5", "tool_call_id": "a", "name": "weather"},
    ]
    told = copy.deepcopy(messages)
    told[1] |= {"content": None}
    told[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments)
    if template == "deepseekv3":
        # It joins arguments to other texts.
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    source = ours._template.source  # pyright: ignore[reportPrivateUsage]
    tokenizer = ours._tokenizer  # pyright: ignore[reportPrivateUsage]
    config = ModelConfig(tokenizer.vocab_size, 64, d_model=16, n_layers=1, n_heads=2)
    chat_template = ChatTemplate(source, VARIABLES)
    opened = LoadedModel(tmp_path, "tiny", config, tokenizer, (), (), chat_template)
    texts = []
    for n in (1, 3):
        body = read_body(json.dumps({"messages": told[:n], "tools": tools}).encode(), ChatBody)
        expected = theirs.apply_chat_template(messages[:n], tools=tools, tokenize=False, add_generation_prompt=True)
        turns = ToolTurns(opened, body)
        assert turns.encode() == theirs.encode(expected, add_special_tokens=False)
        texts.append(expected)
    reader = turns.reader()
    assert reader is not None
    # The answer ends where a special token ends the turn.
    ends = r"<\|eot_id\|>|<\|im_end\|>|<\|call\|>|<\|tool_response>|<｜end▁of▁sentence｜>"
    prompt = texts[0].removesuffix("<think>\n")
    assert texts[1].startswith(prompt)
    written = re.split(ends, texts[1].removeprefix(prompt))[0]
    found = [reader.push(written), reader.finish()]
    assert [text for text, _ in found] == ["", ""]
    assert [call for _, calls in found for call in calls] == [FunctionCall("weather", arguments)]
    other = replace(opened, chat_template=ChatTemplate("{{ messages[0].tool_calls }}"))
    with pytest.raises(ApiError, match="in a form that is not known"):
        ToolTurns(other, body)


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (
            "gptoss",
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome", "days": [1, 2]}<|call|>',
        ),
        (
            "gptoss",
            "<|channel|>analysis<|message|>I ask.<|end|><|start|>assistant to=functions.weather"
            '<|channel|>commentary json<|message|>{"a": {"b": null}}<|call|>',
        ),
        ("gptoss", "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>5.<|return|>"),
        ("gemma4", 'I ask.<|tool_call>call:weather{city:<|"|>Ro{me,<|"|>,days:[1,2.5],deep:{a:true}}<tool_call|>'),
        ("gemma4", '<|tool_call>call:weather{}<tool_call|><|tool_call>call:weather{x:<|"|>é<|"|>}<tool_call|>'),
        ("qwen3", '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'),
    ],
)
def test_calls_are_those_that_transformers_finds(template: str, answer: str) -> None:
    """By TRL's descriptions of answers, whole and a character at a time."""
    parsing, trl = peer("transformers.utils.chat_parsing"), peer("trl.chat_template_utils")
    described = getattr(trl, f"{template}_template")
    prefix = {"gptoss": "<|start|>assistant", "gemma4": "<|turn>model\n", "qwen3": "<|im_start|>assistant\n"}[template]
    theirs = parsing.parse_response(answer, described, prefix=prefix)
    source = (Path(peer("trl").__file__).parent / "chat_templates" / f"{template}.jinja").read_text("utf-8")
    form = call_form(source)
    assert form is not None
    for pieces in ([answer], [*answer]):
        reader = CallReader(form, [Function("weather")])
        found = [*map(reader.push, pieces), reader.finish()]
        functions = [{"name": call.name, "arguments": call.arguments} for _, calls in found for call in calls]
        assert functions == [each["function"] for each in theirs.get("tool_calls", [])]
        # What gpt-oss thinks before a call is the content that its template reads again.
        said = theirs.get("content") or (theirs.get("thinking") if functions else "") or ""
        assert "".join(text for text, _ in found) == said
