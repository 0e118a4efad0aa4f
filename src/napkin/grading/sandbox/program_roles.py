"""The work of a confined process: it answers calls of a program's functions, runs the tests of one, or runs a script.

The first line of standard input says which; lines of JSON go in and out. A program and its tests are in two processes:
the program answers calls with plain data, and nothing that it does to its own process reaches the tests.

Values between a program and its tests are plain data only, in JSON with a tag for what JSON does not have. Objects of a
program never travel: one whose `==` always says yes would pass every test. Numbers, texts, collections and dates of the
standard library do, and iterators by what they give.
"""

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
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, TextIO

MOST_DEPTH = 50
MOST_ITEMS = 10_000
"""The most items taken of an iterator, which may never end."""

_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "keys": lambda items: dict.fromkeys(items).keys(),
    "values": lambda items: dict(enumerate(items)).values(),
    "items": lambda items: dict(items).items(),
}
_KINDS: dict[str, type | tuple[type, ...]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "keys": type({}.keys()),
    "values": type({}.values()),
    "items": type({}.items()),
}
_DATES: dict[str, type] = {"datetime": datetime.datetime, "date": datetime.date, "time": datetime.time}
_DICTS: dict[str, type] = {"Counter": Counter, "OrderedDict": OrderedDict}


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
    if isinstance(value, dict):
        name = next((name for name, each in _DICTS.items() if isinstance(value, each)), "dict")
        return {name: [[to_plain(key, depth + 1), to_plain(each, depth + 1)] for key, each in value.items()]}
    for name, sequence in _KINDS.items():
        if isinstance(value, sequence):
            return {name: [to_plain(each, depth + 1) for each in value]}
    return _rarer(value, depth)


def _rarer(value: Any, depth: int) -> Any:
    if isinstance(value, complex):
        return {"complex": [to_plain(value.real), to_plain(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
    if isinstance(value, Fraction):
        return {"Fraction": [to_plain(value.numerator), to_plain(value.denominator)]}
    if isinstance(value, Decimal):
        return {"Decimal": str(value)}
    if isinstance(value, range):
        return {"range": [to_plain(each) for each in (value.start, value.stop, value.step)]}
    if isinstance(value, deque):
        return {"deque": [[to_plain(each, depth + 1) for each in value], value.maxlen]}
    if isinstance(value, datetime.timedelta):
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    for name, date in _DATES.items():
        if isinstance(value, date):
            return {name: value.isoformat()}
    if hasattr(value, "tolist"):
        return to_plain(value.tolist(), depth + 1)
    if isinstance(value, Iterator):
        items = [to_plain(each, depth + 1) for each in itertools.islice(value, MOST_ITEMS + 1)]
        return {"iterator": items}
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
    if name in _SEQUENCES:
        return _SEQUENCES[name]([from_plain(each) for each in inner])
    if name == "dict" or name in _DICTS:
        pairs = {from_plain(key): from_plain(each) for key, each in inner}
        return pairs if name == "dict" else _DICTS[name](pairs)
    if name in _DATES:
        return _DATES[name].fromisoformat(inner)
    return _READ[name](inner)


def _iterated(items: list[Any]) -> Iterator[Any]:
    yield from map(from_plain, items[:MOST_ITEMS])
    if len(items) > MOST_ITEMS:
        raise IteratorTooLong(f"an iterator gives more than {MOST_ITEMS:,} items")


_READ: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda parts: complex(*map(from_plain, parts)),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "Fraction": lambda parts: Fraction(*map(from_plain, parts)),
    "Decimal": Decimal,
    "range": lambda parts: range(*map(from_plain, parts)),
    "deque": lambda parts: deque(map(from_plain, parts[0]), parts[1]),
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "iterator": _iterated,
}


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
    write_line(answers, {"functions": sorted(functions)})
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
        write_line(answers, told)
    return 0


def is_offered(name: str) -> bool:
    """True if tests may call a program's function of that name."""
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


def write_line(stream: TextIO, answer: dict[str, Any]) -> None:
    """Write a line of JSON, at once."""
    stream.write(json.dumps(answer) + "\n")
    stream.flush()
