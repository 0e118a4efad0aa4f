"""What a confined process does: it answers calls of a program's functions, runs the tests of one, or runs a script.

The first line of standard input says which; lines of JSON go in and out. A program and its tests are in two processes:
the program answers calls with plain data, and nothing that it does to its own process reaches the tests.
"""

import atexit
import builtins
import io
import json
import random
import sys
import threading
import types
from typing import Any, TextIO

from napkin.grading.sandbox.plain_data import IteratorTooLong, NotPlain, from_plain, to_plain

PROGRAM = "program"
"""The module that tests may import the program's functions from."""


def play_role() -> int:
    """Do what the first line of standard input says. Returns the exit status."""
    told = json.loads(sys.stdin.buffer.readline())
    _draw_alike(told["text"])
    return {"calls": _answer_calls, "tests": _run_tests, "script": _run_script}[told["role"]](told)


def _draw_alike(text: str) -> None:
    """A program that draws at random draws the same when it is judged again, as after a resume."""
    random.seed(text.encode("utf-8", "surrogatepass"))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))


def _answer_calls(told: dict[str, Any]) -> int:
    """Run a program, say which functions it has, and answer calls of them."""
    answers = sys.stdout
    sys.stdout = sys.stderr = io.StringIO()
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(told["text"], "<program>", "exec"), names)
    # A program's own `len` or `all` would answer what its tests ask of Python.
    functions = {name: each for name, each in names.items() if callable(each) and is_offered(name)}
    _write(answers, {"functions": sorted(functions)})
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        arguments, named = from_plain(asked["arguments"]), from_plain(asked["named"])
        try:
            value = functions[asked["call"]](*arguments, **named)
            # What a generator raises, it raises here.
            told = {"value": to_plain(value), "arguments": to_plain(arguments)}
        except NotPlain as error:
            told = {"untold": str(error)[:200]}
        except Exception as error:
            told = {"raised": type(error).__name__, "message": str(error)[:200]}
        _write(answers, told)
    return 0


def is_offered(name: str) -> bool:
    """Whether tests may call a program's function of that name."""
    return not name.startswith("_") and not hasattr(builtins, name)


def _run_tests(told: dict[str, Any]) -> int:
    """Run tests whose calls of the program's functions another process answers; say whether they passed."""
    answers = sys.stdout
    sys.stdout = sys.stderr = io.StringIO()
    functions = {name: _Remote(name, answers) for name in told["functions"] if is_offered(name)}
    names: dict[str, Any] = {"__name__": "tests", **functions}
    module = sys.modules[PROGRAM] = types.ModuleType(PROGRAM)
    module.__dict__.update(functions)
    kind = None
    try:
        exec(compile(told["text"], "<tests>", "exec"), names)
        for name, each in list(names.items()):
            if name.startswith("test_") and callable(each) and not isinstance(each, _Remote):
                each()
        passed, why = True, None
    except AssertionError:
        passed, why = False, None
    except BaseException as error:
        passed, why, kind = False, f"{type(error).__name__}: {str(error)[:200]}", _kind_of(error)
    _write(answers, {"passed": passed, "why": why, "kind": kind})
    return 0


def _kind_of(error: BaseException) -> str | None:
    """Whether tests ended since the program lacks a function, or since a value could not travel."""
    if isinstance(error, NameError) or (isinstance(error, ImportError) and error.name == PROGRAM):
        return "missing"
    return "untold" if isinstance(error, IteratorTooLong | _ArgumentNotPlain) else None


class _ArgumentNotPlain(BaseException):
    """An argument of a call cannot travel; no test catches it by chance."""


class _Remote:
    """A function of the program, in the process of its tests."""

    def __init__(self, name: str, answers: TextIO) -> None:
        self._name, self._answers = name, answers

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        try:
            sent = {"arguments": to_plain(list(arguments)), "named": to_plain(named)}
        except NotPlain as error:
            raise _ArgumentNotPlain(f"{self._name} cannot be given a value of type {error}") from None
        _write(self._answers, {"call": self._name, **sent})
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


def _run_script(told: dict[str, Any]) -> int:
    """Run a program that reads standard input and writes standard output; it ends as one of its own would."""
    sys.stdin = io.TextIOWrapper(io.BytesIO(told["input"].encode()), encoding="utf-8")
    sys.stderr = io.StringIO()
    code: Any = None
    try:
        exec(compile(told["text"], "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        code = error.code
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    # Any other object is a message, and the status 1.
    return (code & 0xFF) if isinstance(code, int) else int(code is not None)


def _write(stream: TextIO, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()
