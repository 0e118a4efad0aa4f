"""Tools that a model may call before it answers: an environment that wraps another, which judges the final answers.

A turn of the model with a call is not an answer: the tool's output is the next turn, of role `tool`, and the model
continues. A turn without a call is judged. Calls are written as `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`, the form of Hermes and Qwen2.5, whose chat templates describe the tools to the model, or as
`<NAME>...</NAME>`.

A tool's output is data: bounded text that no chat format encodes as special tokens.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol, runtime_checkable

from napkin.chats.call_blocks import Block, Tag, TaggedText
from napkin.chats.chat_format import Message
from napkin.chats.tool_calls import TOOL_CALL, read_call
from napkin.environments.environment import Environment, Outcome, SolvedEnvironment, Task
from napkin.errors import NapkinError, NotJudged, first_line, suggestion
from napkin.grading.sandbox.tool_program import ToolLimits, ToolProgram
from napkin.hardware.host import usable_cores

MOST_CALLS = 4
"""Calls in an answer outside of training, where `rl.tool_calls` says how many."""
MOST_PARALLEL = 64
"""Programs that run at the same time: each takes a process and two descriptors."""


@runtime_checkable
class Tool(Protocol):
    """A function of a text that a model may call."""

    @property
    def name(self) -> str: ...

    @property
    def argument(self) -> str:
        """The name of its one argument."""
        ...

    @property
    def description(self) -> str: ...

    def __call__(self, text: str) -> str:
        """The tool's output, which is bounded. Raises NotJudged if there is none."""
        ...


@dataclass(frozen=True)
class PythonTool:
    """Runs a program in the sandbox: its output is what the program prints, and the value of its last expression."""

    run: ToolProgram
    name: str = "python"
    argument: str = "code"
    description: str = "Runs a Python program and returns what it prints and the value of its last line."

    def __call__(self, text: str) -> str:
        return self.run(text)


_NOT_ARITHMETIC = re.compile(r"[^0-9+\-*/%().,eE\s]")


@dataclass(frozen=True)
class CalculatorTool:
    """Computes an expression of numbers and operators, in the sandbox: `2**2**30` takes as long as it may."""

    run: ToolProgram
    name: str = "calculator"
    argument: str = "expression"
    description: str = "Computes an arithmetic expression of numbers, + - * / // % ** and parentheses."

    def __call__(self, text: str) -> str:
        wrong = _NOT_ARITHMETIC.search(text)
        if wrong is not None:
            return f"error: {wrong[0]!r} is not arithmetic"
        return self.run(" ".join(text.split()))


DEFAULT_LIMITS = ToolLimits()
TOOLS: dict[str, type[CalculatorTool] | type[PythonTool]] = {"calculator": CalculatorTool, "python": PythonTool}


def tools_named(names: str, limits: ToolLimits = DEFAULT_LIMITS) -> tuple[Tool, ...]:
    """Tools by their names, with commas between them. Raises NapkinError for one that is not known, and where the
    system cannot confine programs."""
    tools: list[Tool] = []
    run = ToolProgram(limits)
    for name in dict.fromkeys(each.strip() for each in names.split(",")):
        if name not in TOOLS:
            raise NapkinError(f"'{name}' in '{names}' is not a tool: {suggestion(name, TOOLS)}")
        tools.append(TOOLS[name](run))
    return tuple(tools)


def tool_schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as chat templates describe them to a model: functions with a JSON schema of their arguments."""
    return [
        {
            "type": "function",
            "function": {
                "name": each.name,
                "description": each.description,
                "parameters": {
                    "type": "object",
                    "properties": {each.argument: {"type": "string"}},
                    "required": [each.argument],
                },
            },
        }
        for each in tools
    ]


@dataclass(frozen=True)
class Call:
    """A call in the text of a model."""

    tool: Tool | None
    """The tool that is called; None if the call cannot be understood."""
    text: str
    """The argument, or what is wrong."""


def calls_in(answer: str, tools: Sequence[Tool]) -> list[Call]:
    """The calls of a text, in their order; a tag that is not closed is none.

    >>> [call.text for call in calls_in("<calculator>2+3</calculator>", tools_named("calculator"))]
    ['2+3']
    """
    by_name = {each.name: each for each in tools}
    tagged = TaggedText(map(Tag.named, [TOOL_CALL, *by_name]))
    blocks = [each for each in (*tagged.push(answer), *tagged.finish()) if isinstance(each, Block)]
    return [
        _json_call(each.content, by_name)
        if each.name == TOOL_CALL
        else Call(by_name[each.name], each.content.strip("\n"))
        for each in blocks
    ]


def _json_call(text: str, by_name: Mapping[str, Tool]) -> Call:
    try:
        name, arguments = read_call(text, by_name)
    except NapkinError as error:
        return Call(None, str(error))
    tool = by_name[name]
    given = arguments.get(tool.argument) if isinstance(arguments, dict) else arguments
    if not isinstance(given, str):
        return Call(None, f"{tool.name} needs '{tool.argument}', a text")
    return Call(tool, given)


def messages_of(calls: Sequence[Call]) -> tuple[Message, ...]:
    """Run calls in their order: what each tool says, or why the call cannot be understood.

    Raises NotJudged where an output cannot be had.
    """
    return tuple(
        Message("tool", f"error: {call.text}" if call.tool is None else call.tool(call.text)) for call in calls
    )


@dataclass(frozen=True)
class ToolState:
    """The state of the wrapped environment, and the number of calls left."""

    inner: Any
    calls_left: int


class ToolEnvironment:
    """An environment with the tasks of another, in which the model may call tools before it answers. A turn's calls are
    run in their order, at most `calls` of them in an episode; once none is left, the next turn is judged whatever it
    contains.
    """

    one_turn = False

    def __init__(self, environment: Environment, tools: Sequence[Tool], *, calls: int = MOST_CALLS) -> None:
        self._inner, self.tools, self._calls = environment, tuple(tools), calls
        inner_parallel = getattr(environment, "n_parallel", 0)
        self.n_parallel = min(inner_parallel or usable_cores(), MOST_PARALLEL)
        # An environment that does not declare threads is called by one at a time.
        self._lock = None if inner_parallel else Lock()

    @property
    def most_turns(self) -> int:
        """The most turns of the model in an episode, for an environment with one turn."""
        return self._calls + 1

    def start(self, seed: int) -> Task:
        task = self._inner.start(seed)
        return Task(task.messages, ToolState(task.state, self._calls), task.content)

    def step(self, state: ToolState, answer: str) -> Outcome:
        """Run the calls of an answer, or have it judged."""
        calls = calls_in(answer, self.tools)[: state.calls_left]
        if not calls:
            return self._judged(state, answer)
        try:
            said = messages_of(calls)
        except NotJudged as error:
            return Outcome(0.0, failure=first_line(error))
        failed = sum(each.content.startswith("error: ") for each in said)
        return Outcome(
            0.0,
            done=False,
            message=said,
            state=ToolState(state.inner, state.calls_left - len(calls)),
            parts={"tool calls": float(len(calls)), "tool errors": float(failed)},
        )

    def solution(self, state: ToolState) -> str:
        """An answer without calls. Raises NapkinError if the environment within knows none."""
        if not isinstance(self._inner, SolvedEnvironment):
            raise NapkinError("the environment has no `solution`: only one that knows a right answer gives one")
        return self._inner.solution(state.inner)

    def _judged(self, state: ToolState, answer: str) -> Outcome:
        if self._lock is None:
            outcome = self._inner.step(state.inner, answer)
        else:
            with self._lock:
                outcome = self._inner.step(state.inner, answer)
        if outcome.done:
            return outcome
        parts = dict(outcome.parts)
        after = ToolState(outcome.state, state.calls_left)
        return Outcome(outcome.reward, done=False, message=outcome.message, state=after, parts=parts)
