"""What holds napkin's functions to their annotations while tests run: beartype, with PEP 484's int as a float.

jaxtyping's decorator gives each call a scope for the names of dimensions, and checks arguments twice: functions without
shapes, which most are, do without. Of those with shapes, a call is checked whose arguments have types and shapes that
the function was not called with before in this process, and so are its first calls. A function within another is
checked where the other is called first. Checks are made at a function's first call: a process calls few of the
functions that it imports.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, ForwardRef, Literal, get_args, get_origin

import jaxtyping
from beartype import BeartypeConf, beartype

CALLS_CHECKED = 32
"""Of each function with shapes."""
_inner_functions: set[CodeType] = set()

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
    inner = "<locals>" in plain.__qualname__
    if inner:
        # Made anew whenever the function around it runs.
        if plain.__code__ in _inner_functions:
            return function
        _inner_functions.add(plain.__code__)
    if any(map(_may_have_shapes, plain.__annotations__.values())):
        if is_dataclass:
            return _with_shapes(function, typechecker=typechecker)
        decorate = functools.partial(_with_shapes, typechecker=typechecker)
        return _first_calls(decorate(function) if inner else _from_first_call(function, decorate), function)
    # Names that an inner function's annotations may have are known where it is made.
    checks = typechecker(plain) if inner or inspect.iscoroutinefunction(plain) else _from_first_call(plain, typechecker)
    if is_dataclass:
        function.__init__ = checks
        return function
    return checks


def _from_first_call(function: Callable[..., Any], decorate: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    from torch.compiler import is_compiling

    checks: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checks
        if is_compiling():
            return function(*args, **kwargs)
        if checks is None:
            checks = decorate(function)
        return checks(*args, **kwargs)

    return call


def _first_calls(checked: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    from torch.compiler import is_compiling

    calls, seen = 0, set()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if is_compiling():
            return function(*args, **kwargs)
        if calls >= CALLS_CHECKED:
            kinds = _kinds(args), _kinds(kwargs.values())
            try:
                if kinds in seen:
                    return function(*args, **kwargs)
                seen.add(kinds)
            except TypeError:  # A size that is a symbol has no hash.
                pass
        calls += 1
        return checked(*args, **kwargs)

    return call


def _kinds(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return what annotations ask of values: types and shapes, also of what is in tuples and lists."""
    return tuple(
        (type(value), tuple(value.shape), value.dtype)
        if hasattr(type(value), "shape") and hasattr(type(value), "dtype")
        else _kinds(value)
        if isinstance(value, tuple | list)
        else type(value)
        for value in values
    )


def _may_have_shapes(annotation: Any) -> bool:
    return "jaxtyping" in repr(annotation) or _has_forward_reference(annotation)


def _has_forward_reference(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return False
    return isinstance(annotation, str | ForwardRef) or any(map(_has_forward_reference, get_args(annotation)))


jaxtyping.jaxtyped = checked
