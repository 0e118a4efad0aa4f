"""What holds napkin's functions to their annotations while tests run: beartype, with PEP 484's int as a float.

jaxtyping's decorator gives each call a scope for the names of dimensions, and checks arguments twice: functions without
shapes, which most are, do without. Of those with shapes, the first calls in each test are checked.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ForwardRef, Literal, get_args, get_origin

import jaxtyping
from beartype import BeartypeConf, beartype

CALLS_CHECKED = 32
"""Of each function with shapes, in each test."""
_test = 0

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
_with_shapes: Callable[..., Any] = jaxtyping.jaxtyped


def checked(function: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    """In place of `jaxtyping.jaxtyped`, which the import hook calls: plain type checks where there are no shapes."""
    if function is None:
        return lambda function: checked(function, typechecker=typechecker)
    is_dataclass = inspect.isclass(function) and dataclasses.is_dataclass(function)
    plain = function.__init__ if is_dataclass else function
    if not inspect.isfunction(plain):
        return _with_shapes(function, typechecker=typechecker)
    if any(map(_may_have_shapes, plain.__annotations__.values())):
        checks = _with_shapes(function, typechecker=typechecker)
        return checks if is_dataclass else _first_calls(checks, function)
    if is_dataclass:
        function.__init__ = typechecker(plain)
        return function
    return typechecker(plain)


def _first_calls(checked: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    test, calls = 0, 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal test, calls
        if test != _test:
            test, calls = _test, 0
        calls += 1
        return (checked if calls <= CALLS_CHECKED else function)(*args, **kwargs)

    return call


def pytest_runtest_setup() -> None:
    """Another test begins."""
    global _test
    _test += 1


def _may_have_shapes(annotation: Any) -> bool:
    return "jaxtyping" in repr(annotation) or _has_forward_reference(annotation)


def _has_forward_reference(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return False
    return isinstance(annotation, str | ForwardRef) or any(map(_has_forward_reference, get_args(annotation)))


jaxtyping.jaxtyped = checked
