"""What runs in a confined process: a program of a model, the tests of one, or a reward function of the user's.

The first line of standard input says which; lines of JSON go in and out. A program and its tests are in two processes:
the program answers calls with plain data, and nothing that it does to its own process reaches the tests.
"""

import ast
import builtins
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from napkin.alignment.rewards.sandbox.confinement import can_confine, confine, limit_resources
from napkin.alignment.rewards.sandbox.plain_data import from_plain, to_plain

MODULES = frozenset(
    """
    __future__ abc array ast base64 binascii bisect calendar cmath collections contextlib copy dataclasses datetime
    decimal difflib enum fractions functools hashlib heapq io itertools json keyword math numbers numpy operator os
    queue random re secrets statistics string struct sys textwrap threading time timeit traceback types typing
    unicodedata uuid warnings zlib
    """.split()
)
"""Modules that a program may import; they are imported before files are given up."""
_BEHIND = {"datetime": ("_strptime",), "collections": ("collections.abc",), "numpy": ("numpy.linalg",)}


def main() -> None:
    """Do what the first line of standard input says."""
    told = json.loads(sys.stdin.buffer.readline())
    limit_resources(told["memory"], told["seconds"])
    {"calls": _answer_calls, "tests": _run_tests, "script": _run_script, "grade": _grade}[told["what"]](told)


def _answer_calls(told: dict[str, Any]) -> None:
    """Run a program, say which functions it has, and answer calls of them."""
    answers = sys.stdout
    _enter(told["program"])
    sys.stdout = sys.stderr = io.StringIO()
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(told["program"], "<program>", "exec"), names)
    # A program's own `len` or `all` would answer what its tests ask of Python.
    functions = {name: each for name, each in names.items() if callable(each) and is_offered(name)}
    _write(answers, {"functions": sorted(functions)})
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        arguments, named = from_plain(asked["arguments"]), from_plain(asked["named"])
        try:
            value = functions[asked["call"]](*arguments, **named)
            _write(answers, {"value": to_plain(value), "arguments": to_plain(arguments)})
        except Exception as error:
            _write(answers, {"raised": type(error).__name__, "message": str(error)[:200]})


def is_offered(name: str) -> bool:
    """Whether tests may call a program's function of that name."""
    return not name.startswith("_") and not hasattr(builtins, name)


def _run_tests(told: dict[str, Any]) -> None:
    """Run tests whose calls of the program's functions another process answers; say whether they passed."""
    answers = sys.stdout
    _enter(told["tests"])
    sys.stdout = sys.stderr = io.StringIO()
    names: dict[str, Any] = {"__name__": "tests"}
    names |= {name: _Remote(name, answers) for name in told["functions"] if is_offered(name)}
    try:
        exec(compile(told["tests"], "<tests>", "exec"), names)
        for name, each in list(names.items()):
            if name.startswith("test_") and callable(each) and not isinstance(each, _Remote):
                each()
        passed, why = True, None
    except AssertionError:
        passed, why = False, None
    except BaseException as error:
        passed, why = False, f"{type(error).__name__}: {str(error)[:200]}"
    _write(answers, {"passed": passed, "why": why})


class _Remote:
    """A function of the program, in the process of its tests."""

    def __init__(self, name: str, answers: TextIO) -> None:
        self._name, self._answers = name, answers

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        sent = list(arguments)
        _write(self._answers, {"call": self._name, "arguments": to_plain(sent), "named": to_plain(named)})
        answer = json.loads(sys.stdin.buffer.readline())
        if "raised" in answer:
            raise _error(str(answer["raised"]), str(answer["message"]))
        for given, changed in zip(arguments, from_plain(answer["arguments"]), strict=True):
            _change(given, changed)
        return from_plain(answer["value"])


def _error(name: str, message: str) -> Exception:
    """What a function raised, as tests may expect it; StopIteration would end a loop of theirs as if all were well."""
    kind = getattr(builtins, name, RuntimeError)
    usual = isinstance(kind, type) and issubclass(kind, Exception)
    if not usual or issubclass(kind, AssertionError | StopIteration | StopAsyncIteration):
        kind = RuntimeError
    try:
        return kind(message)
    except TypeError:
        # Those of Unicode have several arguments.
        return RuntimeError(message)


def _change(given: Any, changed: Any) -> None:
    """A function may have changed what it was given, as a sort in place does."""
    if type(given) is list and type(changed) is list:
        given[:] = changed
    elif (type(given) is set and type(changed) is set) or (type(given) is dict and type(changed) is dict):
        given.clear()
        given.update(changed)


def _run_script(told: dict[str, Any]) -> None:
    """Run a program that reads standard input and writes standard output."""
    _enter(told["program"])
    sys.stdin = io.TextIOWrapper(io.BytesIO(told["input"].encode()), encoding="utf-8")
    exec(compile(told["program"], "<program>", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()


def _grade(told: dict[str, Any]) -> None:
    """Load the user's function, then answer a line of answer and reference with its reward."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    try:
        function = _loaded(told["path"], told["name"])
        _write(answers, {"loaded": True})
    except BaseException as error:
        _write(answers, {"error": f"{type(error).__name__}: {str(error)[:200]}"})
        return
    if can_confine():
        confine(reading=True)
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        try:
            reward = function(asked["answer"], asked["reference"])
            if not isinstance(reward, bool | int | float):
                reward = reward.item() if hasattr(reward, "item") else reward
            if not isinstance(reward, bool | int | float):
                raise TypeError(f"the reward is of type {type(reward).__name__}: a number is needed")
            _write(answers, {"reward": repr(float(reward))})
        except Exception as error:
            _write(answers, {"error": f"{type(error).__name__}: {str(error)[:200]}"})


def _loaded(path: str, name: str) -> Callable[[str, str], Any]:
    import runpy

    sys.path.append(os.path.dirname(path))
    function = runpy.run_path(path).get(name)
    if not callable(function):
        raise NameError(f"it has no function {name}")
    return function


def _enter(program: str) -> None:
    """Import what a program may import, then give up all but computing."""
    for name in sorted(set(_imported(program))):
        if name.partition(".")[0] in MODULES:
            for module in (name, *_BEHIND.get(name, ())):
                try:
                    __import__(module)
                except ImportError:
                    continue
    confine()


def _imported(program: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _write(stream: TextIO, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()
