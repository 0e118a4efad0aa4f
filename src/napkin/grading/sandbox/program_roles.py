"""The work of a confined process: it answers calls of a program's functions, runs the tests of one, or runs a script,
whose input and output are those of a program or of a tool that a model calls.

The first line of standard input says which; lines of JSON go in and out. A program and its tests are in two processes:
the program answers calls with plain data, and nothing that it does to its own process reaches the tests.

Values between a program and its tests are plain data only, in JSON with a tag for what JSON does not have. Objects of a
program's own classes are never sent: one whose `==` is always true would pass every test. Numbers, texts, collections
and dates of the standard library are, and iterators as their items.
"""

import ast
import atexit
import builtins
import datetime
import io
import itertools
import json
import math
import random
import sys
import threading
import traceback
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, TextIO

MOST_DEPTH = 50
MOST_ITEMS = 10_000
"""The most items taken of an iterator, which may never end."""


class NotPlain(TypeError):
    """A value is not plain data; says of which type it is."""


class IteratorTooLong(BaseException):
    """More of an iterator was asked for than travels; no test catches it by chance."""


def to_plain(value: Any, depth: int = 0) -> Any:
    """Convert a value to what JSON can write. Raises NotPlain for one that is not plain data; an iterator is used
    up."""
    if depth > MOST_DEPTH:
        raise NotPlain("one that is nested too deeply")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) < 2**53 else {"int": hex(number)}
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"float": repr(number)}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [to_plain(each, depth + 1) for each in value]
    for name, (kind, write, _) in _FORMS.items():
        if isinstance(value, kind):
            return {name: write(value, lambda each: to_plain(each, depth + 1))}
    if hasattr(value, "tolist"):
        return to_plain(value.tolist(), depth + 1)
    if isinstance(value, Iterator):
        return {"iterator": [to_plain(each, depth + 1) for each in itertools.islice(value, MOST_ITEMS + 1)]}
    raise NotPlain(type(value).__name__)


def from_plain(data: Any) -> Any:
    """The value of `to_plain`. Raises ValueError or TypeError for anything else."""
    if isinstance(data, list):
        return [from_plain(each) for each in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError("it is not plain data")
    ((name, inner),) = data.items()
    return _READ[name](inner) if name in _READ else _FORMS[name][2](inner)


def _iterated(items: list[Any]) -> Iterator[Any]:
    yield from map(from_plain, items[:MOST_ITEMS])
    if len(items) > MOST_ITEMS:
        raise IteratorTooLong(f"an iterator gives more than {MOST_ITEMS:,} items")


_READ: dict[str, Callable[[Any], Any]] = {"int": lambda text: int(text, 16), "float": float, "iterator": _iterated}
_Plain = Callable[[Any], Any]


def _items(value: Any, plain: _Plain) -> list[Any]:
    return [plain(each) for each in value]


def _pairs(value: Any, plain: _Plain) -> list[Any]:
    return [[plain(key), plain(each)] for key, each in value.items()]


def _list(items: Any) -> list[Any]:
    return [from_plain(each) for each in items]


def _dict(pairs: Any) -> dict[Any, Any]:
    return {from_plain(key): from_plain(each) for key, each in pairs}


_FORMS: dict[str, tuple[type, Callable[[Any, _Plain], Any], Callable[[Any], Any]]] = {
    "Counter": (Counter, _pairs, lambda pairs: Counter(_dict(pairs))),
    "OrderedDict": (OrderedDict, _pairs, lambda pairs: OrderedDict(_dict(pairs))),
    "dict": (dict, _pairs, _dict),
    "tuple": (tuple, _items, lambda items: tuple(_list(items))),
    "set": (set, _items, lambda items: set(_list(items))),
    "frozenset": (frozenset, _items, lambda items: frozenset(_list(items))),
    "keys": (type({}.keys()), _items, lambda items: dict.fromkeys(_list(items)).keys()),
    "values": (type({}.values()), _items, lambda items: dict(enumerate(_list(items))).values()),
    "items": (type({}.items()), _items, lambda items: dict(_list(items)).items()),
    "complex": (complex, lambda value, _: [to_plain(value.real), to_plain(value.imag)], lambda x: complex(*_list(x))),
    "bytes": (bytes, lambda value, _: value.hex(), bytes.fromhex),
    "bytearray": (bytearray, lambda value, _: value.hex(), bytearray.fromhex),
    "Fraction": (
        Fraction,
        lambda value, _: [to_plain(value.numerator), to_plain(value.denominator)],
        lambda parts: Fraction(*_list(parts)),
    ),
    "Decimal": (Decimal, lambda value, _: str(value), Decimal),
    "range": (
        range,
        lambda value, _: [to_plain(each) for each in (value.start, value.stop, value.step)],
        lambda parts: range(*_list(parts)),
    ),
    "deque": (
        deque,
        lambda value, plain: [_items(value, plain), value.maxlen],
        lambda parts: deque(_list(parts[0]), parts[1]),
    ),
    "timedelta": (
        datetime.timedelta,
        lambda value, _: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    "datetime": (datetime.datetime, lambda value, _: value.isoformat(), datetime.datetime.fromisoformat),
    "date": (datetime.date, lambda value, _: value.isoformat(), datetime.date.fromisoformat),
    "time": (datetime.time, lambda value, _: value.isoformat(), datetime.time.fromisoformat),
}
"""How values are sent, by their tag: their type, how they are written, and how they are read. Subclasses come first."""


PROGRAM = "program"
"""The module that tests may import the program's functions from."""


def play_role() -> int:
    """Do what the first line of standard input says. Returns the exit status."""
    request = json.loads(sys.stdin.buffer.readline())
    # A program that draws at random draws the same when it is judged again, as after a resume.
    random.seed(request["text"].encode("utf-8", "surrogatepass"))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))
    return {"calls": _answer_calls, "tests": _run_tests, "script": _run_script, "tool": _run_tool}[request["role"]](
        request
    )


def _answer_calls(request: dict[str, Any]) -> int:
    """Run a program, report its functions, and answer calls of them."""
    answers = sys.stdout
    sys.stdout = sys.stderr = io.StringIO()
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(request["text"], "<program>", "exec"), names)
    # A program's own `len` or `all` would answer what its tests ask of Python.
    functions = {name: each for name, each in names.items() if callable(each) and is_offered(name)}
    write_line(answers, {"functions": sorted(functions)})
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        arguments, named = from_plain(asked["arguments"]), from_plain(asked["named"])
        try:
            value = functions[asked["call"]](*arguments, **named)
            # An error of a generator is raised here.
            answer = {"value": to_plain(value), "arguments": to_plain(arguments)}
        except NotPlain as error:
            answer = {"untold": str(error)[:200]}
        except Exception as error:
            answer = {"raised": type(error).__name__, "message": str(error)[:200]}
        write_line(answers, answer)
    return 0


def is_offered(name: str) -> bool:
    """True if tests may call a program's function of that name."""
    return not name.startswith("_") and not hasattr(builtins, name)


def _run_tests(request: dict[str, Any]) -> int:
    """Run tests whose calls of the program's functions another process answers; say whether they passed."""
    answers = sys.stdout
    sys.stdout = sys.stderr = io.StringIO()
    functions = {name: _Remote(name, answers) for name in request["functions"] if is_offered(name)}
    names: dict[str, Any] = {"__name__": "tests", **functions}
    module = sys.modules[PROGRAM] = types.ModuleType(PROGRAM)
    module.__dict__.update(functions)
    kind = None
    try:
        exec(compile(request["text"], "<tests>", "exec"), names)
        for name, each in list(names.items()):
            if name.startswith("test_") and callable(each) and not isinstance(each, _Remote):
                each()
        passed, why = True, None
    except AssertionError:
        passed, why = False, None
    except BaseException as error:
        passed, why, kind = False, f"{type(error).__name__}: {str(error)[:200]}", _kind_of(error)
    write_line(answers, {"passed": passed, "why": why, "kind": kind})
    return 0


def _kind_of(error: BaseException) -> str | None:
    """Tell tests that lack a function of the program from a value that could not travel."""
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
        write_line(self._answers, {"call": self._name, **sent})
        answer = json.loads(sys.stdin.buffer.readline())
        if "raised" in answer:
            raise _error(str(answer["raised"]), str(answer["message"]))
        for given, changed in zip(arguments, from_plain(answer["arguments"]), strict=True):
            _change(given, changed)
        return from_plain(answer["value"])


def _error(name: str, message: str) -> Exception:
    """The error that a function raised, as tests may expect it; StopIteration would end a loop of theirs as if all were
    well."""
    kind = getattr(builtins, name, RuntimeError)
    usual = isinstance(kind, type) and issubclass(kind, Exception)
    if not usual or issubclass(kind, AssertionError | StopIteration | StopAsyncIteration):
        kind = RuntimeError
    try:
        return kind(message)
    except TypeError:
        # Unicode errors have several arguments.
        return RuntimeError(message)


def _change(given: Any, changed: Any) -> None:
    """A function may have changed what it was given, as a sort in place does."""
    if type(given) is list and type(changed) is list:
        given[:] = changed
    elif (type(given) is set and type(changed) is set) or (type(given) is dict and type(changed) is dict):
        given.clear()
        given.update(changed)


def _run_script(request: dict[str, Any]) -> int:
    """Run a program that reads standard input and writes standard output; it ends as one of its own would."""
    sys.stdin = io.TextIOWrapper(io.BytesIO(request["input"].encode()), encoding="utf-8")
    sys.stderr = io.StringIO()
    code: Any = None
    try:
        exec(compile(request["text"], "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        code = error.code
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    # Any other object is a message, and the status 1.
    return (code & 0xFF) if isinstance(code, int) else int(code is not None)


def _run_tool(request: dict[str, Any]) -> int:
    """Run a program as an interactive interpreter does: what it prints, the value of a last expression, and the last
    line of an error go to standard output."""
    sys.stdin, sys.stderr = io.StringIO(), sys.stdout
    names: dict[str, Any] = {"__name__": "__main__"}
    code: Any = None
    try:
        tree = ast.parse(request["text"], "<program>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<program>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<program>", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code)
    except BaseException as error:
        print("".join(traceback.format_exception_only(error)).strip())
        code = 1
    sys.stdout.flush()
    return (code & 0xFF) if isinstance(code, int) else int(code is not None)


def write_line(stream: TextIO, answer: dict[str, Any]) -> None:
    """Write a line of JSON, at once."""
    stream.write(json.dumps(answer) + "\n")
    stream.flush()
