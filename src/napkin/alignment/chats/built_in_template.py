"""The chat template of models that have none: a line per message, which begins with its role."""

import json

_SOURCE = """\
{{- START }}{% for message in messages %}\
{{ message.role + ': ' + message.content | trim }}{% if message.role == 'assistant' %}{{ END }}{% endif %}{{ '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""


def built_in_template(start: str, end: str) -> str:
    """As jinja; `start` is what stands before every text, `end` ends what the assistant says.

    The text is that of `napkin.inference.chat_format.PlainChat` with `end` behind each answer.
    """
    return _SOURCE.replace("START", _text_in_jinja(start)).replace("END", _text_in_jinja(end))


def _text_in_jinja(text: str) -> str:
    """A text as jinja2 writes it: JSON's form, but for characters beyond ASCII."""
    return json.dumps(text, ensure_ascii=False)
