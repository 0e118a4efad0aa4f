"""The process that renders a chat template: a template comes with a model from elsewhere, and is a program.

It runs in jinja2's immutable sandbox, which keeps it from attributes and files; that it ends, and in how much memory,
the sandbox does not say. Hence a process of its own, whose memory the system limits and which its parent ends when it
takes too long (`napkin.chats.chat_template`). Lines of JSON go in and out: first the template, then lines of one
or more renderings, each by its variables.
"""

import json
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_MEMORY = 2**30
"""Bytes of address space; the interpreter with jinja2 takes a tenth of it."""
MOST_OUTPUT = 2**24
"""Characters of a rendered conversation: some four million tokens."""


def main() -> None:
    """Answer each line of standard input until it ends."""
    _limit_memory()
    render = None
    for line in sys.stdin.buffer:
        if line == b"\n":
            # The parent asks whether it has started.
            answer: dict[str, Any] = {}
        elif render is None:
            template = json.loads(line)["template"]
            answer, render = _tried(partial(compiled, template))
        else:
            answer = {"answers": [_rendered(render, each) for each in json.loads(line)["renderings"]]}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _rendered(render: Any, variables: dict[str, Any]) -> dict[str, Any]:
    answer, text = _tried(lambda: _joined(render(variables)))
    return answer or {"text": text}


def _tried(make: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
    """Call a function; return its result, or the error that it raises."""
    try:
        return {}, make()
    except TemplateError as error:
        line_number = getattr(error, "lineno", None)
        place = "" if line_number is None else f" in line {line_number}"
        return {"error": f"{error.message or type(error).__name__}{place}"}, None
    except MemoryError:
        return {"error": "it needs more memory than it may have"}, None
    except RecursionError:
        return {"error": "it is nested too deeply"}, None
    except Exception as error:
        # Whatever a template makes Python raise: types that do not fit, missing keys, division by zero.
        return {"error": f"{type(error).__name__}: {error}"}, None


def compiled(template: str) -> Any:
    """Compile a template to a function of its variables that yields the text in parts, with the helpers of
    `transformers`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template).generate


class _GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant says, for training: the text is that of its body, between the
    variables `generation_begins` and `generation_ends` if they are given."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begins, ends = (
            nodes.Output([nodes.Name(name, "load", lineno=line)], lineno=line)
            for name in ("generation_begins", "generation_ends")
        )
        return nodes.Scope([begins, *body, ends]).set_lineno(line)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja2's own filter would escape what HTML reserves."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _joined(parts: Iterable[str]) -> str:
    kept, length = [], 0
    for part in parts:
        kept.append(part)
        length += len(part)
        if length > MOST_OUTPUT:
            raise TemplateError(f"it writes more than {MOST_OUTPUT} characters")
    return "".join(kept)


def _limit_memory() -> None:
    """Limit the address space, where the system can: Windows has no limits, and macOS does not keep to them."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
