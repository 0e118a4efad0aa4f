"""A tiny model that calls functions: what it answers follows from the last letter of what it is told.

Its next token follows from the last one alone, so each answer is a chain of tokens that occur in no other.
"""

from collections.abc import Mapping
from itertools import pairwise

import torch

from napkin.chats.chat_template import ChatTemplate
from napkin.inference.loaded_model import LoadedModel
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.tokenizer.bpe import ByteTokenizer
from oracles.served_model import SEPARATOR

ROLES = ("system", "user", "assistant", "tool")
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWERS = {
    "A": ROME,
    "B": f"Let me see.\n{PARIS}\n{PARIS.replace('Paris', 'Oslo')}",
    "C": '<tool_call>\n{"name": "weather", "arguments": "Rome"}\n</tool_call> is wrong',
    "D": '<tool_call>\n{"name": "remove", "arguments": {"path": "/"}}\n</tool_call>',
    "E": "No call, 2 < 3.",
    "F": '<tool_call>\n{"name": "weather", "arguments": {"ci',
    "G": "<python>print(6 * 7)</python>",
    "H": '{"name": "weather", "parameters": {"city": "Bern"}}',
    ":": ' "weather", "arguments": {"city": "Ulm"}}\n</tool_call> and more',
    ">": "6 * 7 == 42</python>",
    "5": "It has five degrees.",
    "M": 'I shall ask. [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Lyon"}, "id": "a1b2c3d4e"}]',
    "N": "<|channel|>analysis<|message|>Ask first.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}<|call|> and on',
    "O": "<|channel|>final<|message|>Nothing to call.",
}
_TURNS = """{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}\
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{{ messages[-1].content[-1:] }}{% endif %}"""
TEMPLATES = {
    "hermes": "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|end|>{% endif %}" + _TURNS,
    # It knows nothing of calls, of which the model may have learned all the same.
    "own": _TURNS[: _TURNS.index("{%- for call")] + _TURNS[_TURNS.index("<|end|>") :],
    "llama": _TURNS.replace("<tool_call>\n", "").replace("\n</tool_call>", "").replace('arguments":', 'parameters":')
    + "{# ipython #}",
    "mistral": _TURNS.replace("<tool_call>\n", "[TOOL_CALLS]").replace("\n</tool_call>", ""),
    "harmony": _TURNS.replace("<tool_call>\n", "<|channel|>functions.").replace("\n</tool_call>", ""),
    "unknown": "{# <|tool_calls_section_begin|> #}" + _TURNS.replace("tool_call>", "call>"),
}


def chains(answers: Mapping[str, str]) -> dict[str, list[str]]:
    """Each answer in pieces of six characters or more, none of which occurs twice."""
    used: set[str] = set()
    found = {}
    for letter, answer in answers.items():
        pieces, rest = list[str](), answer
        while rest:
            size = next(n for n in range(6, len(rest) + 1) if rest[:n] not in used and not 0 < len(rest) - n < 6)
            used.add(rest[:size])
            pieces.append(rest[:size])
            rest = rest[size:]
        found[letter] = pieces
    return found


def calling_model(template: str) -> LoadedModel:
    """The model with one of TEMPLATES."""
    by_letter = chains(ANSWERS)
    pieces = [piece for each in by_letter.values() for piece in each]
    special = [SEPARATOR, "<|end|>", *(f"<|{role}|>" for role in ROLES), *pieces]
    tokenizer = ByteTokenizer(special)
    width = -(-tokenizer.vocab_size // 32) * 32
    config = ModelConfig(tokenizer.vocab_size, 2048, d_model=width, n_layers=1, n_heads=4, tie_embeddings=False)
    model = Transformer(config, seed=1).eval()
    ids = {chr(n): n for n in range(128)} | tokenizer.special_tokens
    with torch.no_grad():
        model.embedding.weight.copy_(8 * torch.eye(config.vocab_size, width))
        model.head_weight.zero_()
        for letter, chain in by_letter.items():
            for before, after in pairwise([letter, *chain, SEPARATOR]):
                model.head_weight[ids[after], ids[before]] = 10.0
    return LoadedModel.of(model, tokenizer, name="tiny", chat_template=ChatTemplate(TEMPLATES[template]))
