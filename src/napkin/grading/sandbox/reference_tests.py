"""Reads what a reference asks of programs: tests that call functions of the answer's, or inputs with outputs.

Names that tests read and nobody defines are functions of the program: those that they call, or hand to a function of
their own. A helper whose import was forgotten would be one, too, and a program that defines `isclose` to be always true
would pass. So a name of the standard library counts as the program's only if it is the one that is tested; `from
program import NAME` says of any name that it is.
"""

import ast
import builtins
import importlib
import json
import symtable
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeGuard

from napkin.errors import NapkinError
from napkin.grading.sandbox.fork_server import MODULES
from napkin.grading.sandbox.program_roles import PROGRAM

_OF_EVERY_MODULE = "__name__ __doc__ __builtins__ __file__ __spec__ __loader__".split()
_LIBRARIES = """
    bisect cmath collections copy datetime decimal fractions functools heapq itertools math random re statistics string
    typing
    """.split()
_OTHER_HELPERS = frozenset(
    """
    allclose approx array array_equal assert_allclose assert_almost_equal assert_array_equal assert_equal raises
    """.split()
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_FILLING = frozenset("add append extend insert setdefault update".split())
"""Methods that put a value into what they are called of."""


@dataclass(frozen=True)
class ReferenceTests:
    """A reference that has been read."""

    tests: str
    """A program of tests; empty if it has cases."""
    functions: frozenset[str] = frozenset()
    """Functions of the program that the tests call."""
    check: str | None = None
    """A function of the tests that is to be called with the program's, and that they do not call themselves."""
    cases: tuple[tuple[str, str], ...] = ()
    """Pairs of a program's input and the output that is asked for."""


@lru_cache(maxsize=256)
def read_reference(reference: str) -> ReferenceTests:
    """Read the tests of a reference. Raises NapkinError for one that no program could fulfil, or any could."""
    listed = _listed(reference)
    if isinstance(listed, ReferenceTests):
        return listed
    tests = listed or reference
    tree = parsed(tests)
    if tree is None:
        raise NapkinError("the reference is not a program of tests that Python can read: correct it")
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise NapkinError("the reference has no `assert`: tests without one would pass for any program")
    _refuse_missing_modules(tree)
    free, declared = _free_names(tests, tree), _imported_from_program(tree)
    _refuse_unresolved(tree, free)
    check = _uncalled_check(tree)
    if check is None and not free and not declared:
        raise NapkinError(
            "the reference never calls a function of the program: use one that it does not define, or `from program "
            "import NAME`"
        )
    return ReferenceTests(tests, free | declared, check)


def parsed(program: str) -> ast.Module | None:
    """The tree of a program; None if Python cannot read it."""
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _listed(reference: str) -> ReferenceTests | str | None:
    """Read JSON: inputs with outputs, or a list of assertions as a program; None for anything else."""
    try:
        listed = json.loads(reference)
    except (ValueError, RecursionError):
        return None
    listed = [listed] if isinstance(listed, dict) else listed
    if not isinstance(listed, list) or not listed:
        return None
    lines = [each for each in listed if isinstance(each, str)]
    if len(lines) == len(listed):
        return "\n".join(lines)
    pairs = [(each.get("input"), each.get("output")) for each in listed if isinstance(each, dict)]
    cases = tuple((read, written) for read, written in pairs if isinstance(read, str) and isinstance(written, str))
    return ReferenceTests("", cases=cases) if len(cases) == len(listed) else None


def _refuse_missing_modules(tree: ast.Module) -> None:
    known = {*sys.stdlib_module_names, "numpy", PROGRAM}
    for node in _outside_of_try(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.partition(".")[0] not in known:
                raise NapkinError(f"the reference imports {name!r}, which the sandbox does not have: do without it")


def _outside_of_try(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Try):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _outside_of_try(child)


def _imported_from_program(tree: ast.Module) -> frozenset[str]:
    names, modules = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == PROGRAM:
            names |= {alias.name for alias in node.names if alias.name != "*"}
        elif isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == PROGRAM}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            names.add(node.attr)
    return frozenset(names)


def _free_names(tests: str, tree: ast.Module) -> frozenset[str]:
    """Names that are read and defined nowhere."""
    try:
        top = symtable.symtable(tests, "<tests>", "exec")
    except (SyntaxError, ValueError, RecursionError):
        raise NapkinError("the reference is not a program of tests that Python can read: correct it") from None
    bound: set[str] = set(_OF_EVERY_MODULE)
    read, scopes = set[str](), [top]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            is_global = scope is top or symbol.is_global()
            if is_global and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()):
                bound.add(symbol.get_name())
            if is_global and symbol.is_referenced():
                read.add(symbol.get_name())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES and node.names[0].name == "*":
            bound |= set(dir(importlib.import_module(node.module)))
    return frozenset(name for name in read - bound if not hasattr(builtins, name))


def _refuse_unresolved(tree: ast.Module, free: frozenset[str]) -> None:
    """Raise NapkinError for free names that are not functions of the program."""
    for node in ast.walk(tree):
        base = node.value if isinstance(node, ast.Attribute | ast.Subscript) else None
        base = node.type if isinstance(node, ast.ExceptHandler) else base
        if isinstance(base, ast.Name) and base.id in free:
            raise _not_defined(base.id)
    tests = [node for node in ast.walk(tree) if _decides(node)]
    for name in sorted(free):
        results = _results(tree, free - {name})
        is_judge = any(_judges(node.test, name, results) for node in tests)
        asked = [_names_in(node, results | {name}) for node in tests]
        # A function under test must not serve to test others.
        if is_judge or (results and name in _library_names() and {name} not in asked):
            raise _not_defined(name)


def _decides(node: ast.AST) -> TypeGuard[ast.Assert | ast.If]:
    return isinstance(node, ast.Assert) or (
        isinstance(node, ast.If) and any(isinstance(each, ast.Raise) for each in ast.walk(node))
    )


def _judges(test: ast.expr, name: str, results: frozenset[str]) -> bool:
    """True if a test takes a free name's word for another's result: assert isclose(area(2), 12.5)."""
    return any(
        isinstance(each, ast.Call)
        and isinstance(each.func, ast.Name)
        and each.func.id == name
        and bool(_names_in(each, results))
        for each in _believed(test)
    )


def _believed(test: ast.expr) -> Iterator[ast.expr]:
    """The parts of a test whose truth it checks."""
    match test:
        case ast.UnaryOp():
            yield from _believed(test.operand)
        case ast.BoolOp():
            for each in test.values:
                yield from _believed(each)
        case ast.Compare(comparators=[ast.Constant(value=bool())]):
            yield from _believed(test.left)
        case ast.Call(func=ast.Name(id="all" | "any"), args=[ast.GeneratorExp() | ast.ListComp() as each]):
            yield from _believed(each.elt)
        case _:
            yield test


def _results(tree: ast.Module, sources: frozenset[str]) -> frozenset[str]:
    """Names that may hold what the program gives: the sources, arguments that are called as HumanEval's `candidate` is,
    and all that is made of these."""
    nodes = list(ast.walk(tree))
    functions = {node.name: node for node in nodes if isinstance(node, _FUNCTION)}
    found = set(sources)
    for function in functions.values():
        calls = [each.func for each in ast.walk(function) if isinstance(each, ast.Call)]
        found |= _parameters(function) & {each.id for each in calls if isinstance(each, ast.Name)}
    size = -1
    while size < len(found):
        size = len(found)
        for node in nodes:
            targets, values = _flow(node, functions)
            if targets and any(_names_in(each, found) for each in values):
                found |= targets
    return frozenset(found)


def _flow(node: ast.AST, functions: dict[str, _Function]) -> tuple[set[str], Sequence[ast.AST]]:
    """The names that a node gives a value, and what that is made of."""
    match node:
        case ast.Assign():
            return {name for each in node.targets for name in _names_in(each)}, [node.value]
        case ast.AnnAssign(value=ast.expr() as value):
            return _names_in(node.target), [value]
        case ast.AugAssign() | ast.NamedExpr():
            return _names_in(node.target), [node.value]
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            return _names_in(node.target), [node.iter]
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return {node.name}, [each for each in ast.walk(node) if isinstance(each, ast.Return | ast.Yield)]
        case ast.Call(func=ast.Name(id=name)) if name in functions:
            return _parameters(functions[name]), [*node.args, *node.keywords]
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if attr in _FILLING:
            return {name}, node.args
        case _:
            return set(), ()


def _parameters(function: _Function) -> set[str]:
    arguments = function.args
    return {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _names_in(node: ast.AST, names: Collection[str] | None = None) -> set[str]:
    used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return used if names is None else used & set(names)


@lru_cache(maxsize=1)
def _library_names() -> frozenset[str]:
    modules = [importlib.import_module(name) for name in _LIBRARIES]
    return _OTHER_HELPERS | {name for module in modules for name in dir(module) if not name.startswith("_")}


def _not_defined(name: str) -> NapkinError:
    return NapkinError(
        f"the reference reads {name!r}, which it neither defines nor imports: import it, from `program` if it is a "
        "function of the program"
    )


def _uncalled_check(tree: ast.Module) -> str | None:
    """The last function with assertions that takes one argument, calls it or hands it on, and is named nowhere else, as
    HumanEval's `check(candidate)`."""
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in reversed(tree.body):
        if not isinstance(node, _FUNCTION) or node.name in named or node.name.startswith("test_"):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args]
        if len(arguments) - len(node.args.defaults) != 1:
            continue
        within = list(ast.walk(node))
        uses = any(isinstance(each, ast.Name) and each.id == arguments[0].arg for each in within)
        if uses and any(isinstance(each, ast.Assert) for each in within):
            return node.name
    return None
