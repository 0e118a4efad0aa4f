"""Values between a program and its tests: plain data only, in JSON with a tag for what JSON does not have.

Objects of a program never travel: one whose `==` always says yes would pass every test. Numbers, texts, collections and
dates of the standard library do, and iterators by what they give.
"""

import datetime
import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

MOST_DEPTH = 50
MOST_ITEMS = 10_000
"""Of an iterator, which may never end."""

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
    """What JSON can write of a value. Raises NotPlain for one that is not plain data; an iterator is used up."""
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
