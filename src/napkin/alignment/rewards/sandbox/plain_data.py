"""Values between a program and its tests: plain data only, in JSON with a tag for what JSON does not have.

Objects of a program never travel: one whose `==` always says yes would pass every test.
"""

import math
from typing import Any

MOST_DEPTH = 50

_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}


def to_plain(value: Any, depth: int = 0) -> Any:
    """What JSON can write of a value. Raises TypeError for one that is not plain data."""
    if depth > MOST_DEPTH:
        raise TypeError("it is nested too deeply")
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
    if kind is complex:
        return {"complex": [to_plain(value.real), to_plain(value.imag)]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, list):
        return [to_plain(each, depth + 1) for each in value]
    if isinstance(value, dict):
        return {"dict": [[to_plain(key, depth + 1), to_plain(each, depth + 1)] for key, each in value.items()]}
    for name, sequence in _SEQUENCES.items():
        if isinstance(value, sequence):
            return {name: [to_plain(each, depth + 1) for each in value]}
    if hasattr(value, "tolist"):
        return to_plain(value.tolist(), depth + 1)
    raise TypeError(f"a value of type {kind.__name__} is not plain data")


def from_plain(data: Any) -> Any:
    """The value of `to_plain`. Raises ValueError or TypeError for anything else."""
    if isinstance(data, list):
        return [from_plain(each) for each in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError("it is not plain data")
    ((name, inner),) = data.items()
    if name == "int":
        return int(inner, 16)
    if name == "float":
        return float(inner)
    if name == "complex":
        return complex(*map(from_plain, inner))
    if name == "bytes":
        return bytes.fromhex(inner)
    if name == "dict":
        return {from_plain(key): from_plain(each) for key, each in inner}
    return _SEQUENCES[name](map(from_plain, inner))
