"""Rules as JavaScript, translated from their Python: a page computes what Python computes.

A rule is arithmetic on numbers. Translated are assignments, `if`, `return`; numbers, strings, None, dictionaries with
names; the operators of Python that have a twin, `min`, `max`, the functions of `math`, and calls of other rules.
Parameters that Python takes by name alone are the fields of one object, and `**others` the rest of them. Everything
else is refused, with its line, so that no rule is translated partly.
"""

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable

from napkin.errors import NapkinError

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "===",
    ast.NotEq: "!==",
    ast.Is: "===",
    ast.IsNot: "!==",
    ast.And: "&&",
    ast.Or: "||",
}
_MATH = {"sqrt", "exp", "expm1", "log", "log2"}


def javascript_of(rules: Iterable[Callable]) -> str:
    """The functions and those that they call, each once, callees first, as declarations of a script.

    Raises NapkinError for a function that is more than arithmetic.
    """
    written: dict[str, str] = {}

    def write(rule: Callable) -> None:
        if rule.__name__ in written:
            return
        translation = _Translation(rule)
        text = translation.text()
        for called in translation.called:
            write(called)
        written[rule.__name__] = text

    for rule in rules:
        write(rule)
    return "\n\n".join(written.values()) + "\n"


class _Translation:
    """The translation of one function."""

    def __init__(self, rule: Callable) -> None:
        self.called: list[Callable] = []
        self._rule = rule
        self._names = inspect.unwrap(rule).__globals__
        tree = ast.parse(textwrap.dedent(inspect.getsource(rule)))
        (found,) = tree.body
        assert isinstance(found, ast.FunctionDef)
        self._function = found
        arguments = found.args
        self._assigned: list[str] = []
        self._local = {each.arg for each in (*arguments.args, *arguments.kwonlyargs, arguments.kwarg) if each}

    def text(self) -> str:
        """The declaration."""
        arguments = self._function.args
        before = [None] * (len(arguments.args) - len(arguments.defaults))
        given = [
            self._parameter(each, default)
            for each, default in zip(arguments.args, [*before, *arguments.defaults], strict=True)
        ]
        if arguments.kwonlyargs:
            named = [
                self._parameter(each, default)
                for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            ]
            if arguments.kwarg:
                named.append(f"...{arguments.kwarg.arg}")
            given.append(f"{{ {', '.join(named)} }}" + (" = {}" if all(arguments.kw_defaults) else ""))
        body = self._block(self._function.body, "  ")
        # In Python a name has the scope of the whole function, wherever it is first assigned.
        declared = f"  let {', '.join(self._assigned)};\n" if self._assigned else ""
        return f"function {self._function.name}({', '.join(given)}) {{\n{declared}{body}\n}}"

    def _parameter(self, argument: ast.arg, default: ast.expr | None) -> str:
        return argument.arg if default is None else f"{argument.arg} = {self._value(default)}"

    def _block(self, statements: list[ast.stmt], indent: str) -> str:
        return "\n".join(line for each in statements for line in self._statement(each, indent))

    def _statement(self, node: ast.stmt, indent: str) -> list[str]:
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                return []
            case ast.Return(value=ast.expr() as value):
                return [f"{indent}return {self._value(value)};"]
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                text = self._value(value)
                if name not in self._local:
                    self._local.add(name)
                    self._assigned.append(name)
                return [f"{indent}{name} = {text};"]
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value) if type(op) in _OPERATORS:
                return [f"{indent}{name} = {name} {_OPERATORS[type(op)]} {self._value(value)};"]
            case ast.If(test=test, body=body, orelse=orelse):
                lines = [f"{indent}if ({self._value(test)}) {{", self._block(body, indent + "  "), f"{indent}}}"]
                if orelse:
                    lines = [*lines[:-1], f"{indent}}} else {{", self._block(orelse, indent + "  "), f"{indent}}}"]
                return lines
        raise self._refusal(node)

    def _value(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=None):
                return "null"
            case ast.Constant(value=bool() as value):
                return "true" if value else "false"
            case ast.Constant(value=int() | float() as value):
                return repr(value)
            case ast.Constant(value=str() as value):
                return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
            case ast.Name(id=name) if name in self._local:
                return name
            case ast.Name(id=name) if isinstance(self._names.get(name), int | float):
                return repr(self._names[name])
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return f"({self._value(left)}) ** {self._value(right)}"
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
                return f"Math.floor(({self._value(left)}) / ({self._value(right)}))"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return f"({self._value(left)} {_OPERATORS[type(op)]} {self._value(right)})"
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return f"(-{self._value(operand)})"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return f"(!{self._value(operand)})"
            case ast.BoolOp(op=op, values=values):
                return "(" + f" {_OPERATORS[type(op)]} ".join(map(self._value, values)) + ")"
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                return f"({self._value(left)} {_OPERATORS[type(op)]} {self._value(right)})"
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return f"({self._value(test)} ? {self._value(body)} : {self._value(orelse)})"
            case ast.Dict(keys=keys, values=values):
                fields = [
                    f"...{self._value(value)}" if key is None else f"{self._value(key)}: {self._value(value)}"
                    for key, value in zip(keys, values, strict=True)
                ]
                return "{ " + ", ".join(fields) + " }"
            case ast.Subscript(value=value, slice=key):
                return f"{self._value(value)}[{self._value(key)}]"
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=arguments, keywords=[]):
                return f"Math.{name}({', '.join(map(self._value, arguments))})"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr=name), args=[argument]) if name in _MATH:
                assert self._names["math"] is math
                return f"Math.{name}({self._value(argument)})"
            case ast.Call(func=ast.Name(id=name)) if inspect.isfunction(self._names.get(name)):
                return self._call(node, self._names[name])
        raise self._refusal(node)

    def _call(self, node: ast.Call, rule: Callable) -> str:
        """A call of another rule: what has a place goes there, what has a name alone into an object."""
        self.called.append(rule)
        parameters = inspect.signature(rule).parameters
        places = [name for name, each in parameters.items() if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        given = {name: self._value(value) for name, value in zip(places, node.args, strict=False)}
        others: list[str] = []
        for keyword in node.keywords:
            if keyword.arg is None:
                others.append(f"...{self._value(keyword.value)}")
            else:
                given[keyword.arg] = self._value(keyword.value)
        if len(node.args) > len(places):
            raise self._refusal(node)
        last = max((place for place, name in enumerate(places) if name in given), default=-1)
        arguments = [given.get(name, "undefined") for name in places[: last + 1]]
        named = [f"{name}: {value}" for name, value in given.items() if name not in places] + others
        if named:
            arguments += ["undefined"] * (len(places) - len(arguments))
            arguments.append(f"{{ {', '.join(named)} }}")
        return f"{rule.__name__}({', '.join(arguments)})"

    def _refusal(self, node: ast.AST) -> NapkinError:
        line, text = getattr(node, "lineno", 0), ast.unparse(node).splitlines()[0]
        return NapkinError(
            f"{self._rule.__module__}.{self._rule.__name__}, line {line}, `{text}` is not translated: "
            "use numbers, if, arithmetic, min, max and other rules"
        )
