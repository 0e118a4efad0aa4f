"""Tokens of an answer become a tree, by precedence: lists, relations, unions, sums, products, signs, powers.

Where two readings are usual, such as 1/2x, the answer is not understood: a wrong guess would reward a wrong answer.
"""

from fractions import Fraction

from napkin.grading.mathematics.answer_tokens import Token
from napkin.grading.mathematics.expression import (
    EMPTY_SET,
    Call,
    Collection,
    Node,
    NotUnderstood,
    Number,
    Relation,
    Symbol,
    Words,
)

MOST_DEPTH = 24
"""The deepest nesting of brackets, powers and functions."""
MOST_ITEMS = 64
"""The longest list."""
MOST_POWER_OF_TEN = 400
"""The largest exponent of a number written as 1.5e10."""

_RELATIONS = {"=": "=", "<": "<", "≤": "≤", ">": "<", "≥": "≤", "≠": "≠", "∈": "∈"}
_TURNED = (">", "≥")
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "⟨": "⟩", "⌊": "⌋", "⌈": "⌉"}
_ROUNDING = {"⌊": "floor", "⌈": "ceil"}
_BEGIN_FACTOR = frozenset({"(", "{", "√", "⌊", "⌈"})
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}


def parse_tokens(tokens: list[Token]) -> Node:
    """The tree of an answer without its unit. Raises NotUnderstood."""
    if not tokens:
        raise NotUnderstood("it is empty")
    parser = _Parser(tokens)
    try:
        node = parser.items()
    except RecursionError:
        raise NotUnderstood("it is nested too deeply") from None
    if parser.left:
        raise NotUnderstood(f"{parser.left[0].text[:20]!r} does not fit")
    return node


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens, self._at, self._depth, self._in_bars = tokens, 0, 0, False

    @property
    def left(self) -> list[Token]:
        return self._tokens[self._at :]

    def items(self) -> Node:
        """Items with commas, `or` and `and` between them: a list if there are several."""
        items = [self._relation()]
        while self._take(",", ";", "or", "and"):
            # "1, 2, and 3"
            if self._tokens[self._at - 1].text == ",":
                self._take("or", "and")
            items.append(self._relation())
            if len(items) > MOST_ITEMS:
                raise NotUnderstood("it has too many items")
        return items[0] if len(items) == 1 else Collection("", tuple(items), "")

    def _relation(self) -> Node:
        sides, relations, turned = [self._union()], [], set[bool]()
        while (sign := self._take(*_RELATIONS)) is not None:
            relations.append(_RELATIONS[sign])
            if sign in "<≤>≥":
                turned.add(sign in _TURNED)
            sides.append(self._union())
        if not relations:
            return sides[0]
        if len(turned) == 2 or (turned and not set(relations) <= {"<", "≤"}):
            raise NotUnderstood("its relations run in several directions")
        if turned == {True}:
            sides, relations = sides[::-1], relations[::-1]
        return Relation(tuple(sides), tuple(relations))

    def _union(self) -> Node:
        parts = [self._sum()]
        while self._take("∪"):
            parts.append(self._sum())
        return parts[0] if len(parts) == 1 else Collection("∪", tuple(parts), "")

    def _sum(self) -> Node:
        node = self._product()
        while (sign := self._take("+", "-", "±")) is not None:
            right = self._product()
            operator = {"+": "+", "-": "-", "±": "plus-minus"}[sign]
            node = Call(operator, (node, right))
        return node

    def _product(self) -> Node:
        node, divided = self._signed(), False
        while True:
            if self._take("*"):
                node = Call("*", (node, self._signed()))
            elif self._take("/"):
                node, divided = Call("/", (node, self._signed())), True
            elif self._begins_factor():
                # 1/2x may be meant either way, and so may 2 3.
                after_factorial = isinstance(node, Call) and node.operator == "factorial"
                if divided or (self._next("number") and not after_factorial):
                    raise NotUnderstood("a product without a sign is not clear")
                node = Call("*", (node, self._power()))
            else:
                return node

    def _signed(self) -> Node:
        if (sign := self._take("-", "+", "±")) is not None:
            self._deeper()
            inner = self._signed()
            self._depth -= 1
            if sign == "+":
                return inner
            return Call("negative", (inner,)) if sign == "-" else Call("plus-minus", (Number(Fraction(0)), inner))
        return self._mixed() or self._mixed_fraction(self._power())

    def _mixed(self) -> Node | None:
        """1 1/2, one and a half."""
        tokens = self._tokens[self._at : self._at + 4]
        if [each.kind for each in tokens] != ["number", "number", "mark", "number"] or tokens[2].text != "/":
            return None
        whole, top, bottom = (_number(tokens[place].text) for place in (0, 1, 3))
        if any(each.denominator != 1 for each in (whole, top, bottom)) or not 0 < top < bottom:
            raise NotUnderstood("a number before a fraction is not clear")
        self._at += 4
        return Number(whole + top / bottom)

    def _mixed_fraction(self, node: Node) -> Node:
        r"""2\frac{1}{2}, two and a half, where a number has been read; another node as it is."""
        if not isinstance(node, Number) or not self.left or self.left[0] != Token("command", "frac"):
            return node
        begin = self._at
        right = self._atom()
        if self._peek() not in ("%", "\\%") or not _is_proper_fraction(right):
            self._at = begin
            right = self._power()
        if isinstance(right, Call) and right.operator == "/":
            top, bottom = right.arguments
            if not isinstance(top, Number) or not isinstance(bottom, Number):
                return Call("*", (node, right))
            if node.value.denominator == 1 and 0 < top.value < bottom.value:
                return self._with_marks_after(Call("+", (node, right)))
        raise NotUnderstood("a number before a fraction is not clear")

    def _power(self) -> Node:
        node = self._with_marks_after(self._atom())
        if self._take("^"):
            in_braces = [each.text for each in self._tokens[self._at : self._at + 3]] == ["{", "°", "}"]
            if in_braces or self._take("°"):
                self._at += 3 * in_braces
                return self._with_marks_after(Call("degrees", (node,)))
            return Call("^", (node, self._argument(sign=True)))
        return node

    def _with_marks_after(self, node: Node) -> Node:
        while (mark := self._take("!", "°", "%", "\\%")) is not None:
            if mark == "!":
                node = Call("factorial", (node,))
            elif mark == "°":
                node = Call("degrees", (node,))
            else:
                node = Call("/", (node, Number(Fraction(100))))
        return node

    def _argument(self, *, sign: bool = False) -> Node:
        """Read the argument behind ^, or in braces: a group, or a single number or name."""
        self._deeper()
        if sign and (self._peek() == "-"):
            self._at += 1
            node: Node = Call("negative", (self._argument(),))
        elif sign:
            # Powers within powers are read from the right.
            node = self._power()
        else:
            node = self._atom()
        self._depth -= 1
        return node

    def _atom(self) -> Node:
        self._deeper()
        node = self._atom_inside()
        self._depth -= 1
        return node

    def _atom_inside(self) -> Node:
        if self._at >= len(self._tokens):
            raise NotUnderstood("it ends too early")
        token = self._tokens[self._at]
        self._at += 1
        if token.kind == "number":
            return self._numeral(token)
        if token.kind == "name":
            return EMPTY_SET if token.text == "∅" else self._symbol(token.text)
        if token.kind == "words":
            return Words(token.text)
        if token.kind == "function":
            return self._root() if token.text == "sqrt" else self._function(token.text)
        if token.kind == "command":
            return self._command(token.text)
        if token.text in _CLOSING:
            return self._bracketed(token.text)
        if token.text == "√":
            return Call("sqrt", (self._argument(),))
        if token.text in ("|", "\\|") and not self._in_bars:
            self._in_bars = True
            inner = self._sum()
            self._in_bars = False
            self._expect(token.text)
            if isinstance(inner, Collection) and inner.opening == "matrix":
                return Collection("vmatrix", inner.items, "")
            return Call("abs", (inner,))
        raise NotUnderstood(f"{token.text[:20]!r} does not fit")

    def _numeral(self, token: Token) -> Node:
        if self._take("_"):
            base = self._argument()
            return Call("base", (Words(token.text), base))
        return Number(_number(token.text))

    def _symbol(self, name: str) -> Node:
        if not self._take("_"):
            return Symbol(name)
        index = self._argument()
        if not isinstance(index, Number | Symbol):
            raise NotUnderstood("an index is not a number or a letter")
        return Symbol(f"{name}_{index.value if isinstance(index, Number) else index.name}")

    def _bracketed(self, opening: str) -> Node:
        bars, self._in_bars = self._in_bars, False
        if opening in ("{", *_ROUNDING):
            node = self._sum() if opening in _ROUNDING else self.items()
            self._expect(_CLOSING[opening])
            self._in_bars = bars
            return Call(_ROUNDING[opening], (node,)) if opening in _ROUNDING else node
        if opening == "\\{" and self._take("\\}"):
            self._in_bars = bars
            return EMPTY_SET
        inner = self.items()
        closing = self._take(")", "]") if opening in "([" else self._take(_CLOSING[opening])
        self._in_bars = bars
        if closing is None:
            raise NotUnderstood("a bracket is not closed")
        several = isinstance(inner, Collection) and inner.opening == ""
        is_matrix = isinstance(inner, Collection) and inner.opening == "matrix"
        if (opening + closing == "()" and not several) or (opening + closing in ("()", "[]") and is_matrix):
            return inner
        items = inner.items if several and isinstance(inner, Collection) else (inner,)
        return Collection(opening.lstrip("\\"), items, closing.lstrip("\\"))

    def _root(self) -> Node:
        if self._peek() == "[":
            self._at += 1
            degree = self._sum()
            self._expect("]")
            return Call("root", (self._argument(), degree))
        return Call("sqrt", (self._single_argument(),))

    def _single_argument(self) -> Node:
        """LaTeX takes one digit; \\sqrt12 is not clear."""
        token = self._tokens[self._at] if self.left else None
        if token is not None and token.kind == "number" and len(token.text) > 1:
            raise NotUnderstood("a root of several digits without brackets is not clear")
        return self._argument()

    def _command(self, name: str) -> Node:
        if name == "sqrt":
            return self._root()
        if name == "overline":
            raise NotUnderstood("a bar is not clear")
        if name in ("begin", "end"):
            return self._matrix()
        top, bottom = self._two_arguments()
        return Call("/" if name == "frac" else "binom", (top, bottom))

    def _two_arguments(self) -> tuple[Node, Node]:
        token = self._tokens[self._at] if self.left else None
        if token is not None and token.kind == "number" and len(token.text) > 1:
            # \frac12 is a half.
            if len(token.text) != 2 or not token.text.isdigit():
                raise NotUnderstood("a fraction without braces is not clear")
            self._at += 1
            return Number(Fraction(int(token.text[0]))), Number(Fraction(int(token.text[1])))
        top = self._argument()
        return top, self._single_argument()

    def _matrix(self) -> Node:
        """Read {pmatrix} rows \\end{pmatrix} behind \\begin."""
        kind = self._environment()
        if kind == "array":
            self._skip_columns()
        rows: list[Node] = []
        row: list[Node] = [self._sum()]
        while True:
            if self._take("&"):
                row.append(self._sum())
                continue
            rows.append(Collection("row", tuple(row), ""))
            row = []
            if not self._take("\\\\"):
                break
            if self.left and self.left[0].kind == "command" and self.left[0].text == "end":
                break
            row = [self._sum()]
        if not self.left or self.left[0] != Token("command", "end"):
            raise NotUnderstood("a matrix does not end")
        self._at += 1
        if self._environment() != kind:
            raise NotUnderstood("a matrix does not end")
        return Collection("vmatrix" if kind == "vmatrix" else "matrix", tuple(rows), "")

    def _environment(self) -> str:
        self._expect("{")
        # "pmatrix" may have been read as a word or as letters.
        name = ""
        while self.left and self._peek() != "}":
            name += self._tokens[self._at].text
            self._at += 1
        self._expect("}")
        if name not in ("pmatrix", "bmatrix", "matrix", "smallmatrix", "array", "vmatrix", "Bmatrix"):
            raise NotUnderstood("only matrices are known")
        return name

    def _skip_columns(self) -> None:
        """Skip an array's columns, {cc} or {c|c}."""
        self._expect("{")
        while self.left and self._peek() != "}":
            self._at += 1
        self._expect("}")

    def _function(self, name: str) -> Node:
        base, power = None, None
        if name == "log" and self._take("_"):
            base = self._argument()
        if self._take("^"):
            power = self._argument(sign=True)
        if power == Call("negative", (Number(Fraction(1)),)) and name in _INVERSE:
            name, power = _INVERSE[name], None
        argument = self._function_argument()
        node: Node = Call(name, (argument,) if base is None else (argument, base))
        return node if power is None else Call("^", (node, power))

    def _function_argument(self) -> Node:
        """A bracket, or a product without signs: sin 2x."""
        if self._peek() in ("(", "{"):
            return self._with_marks_after(self._atom())
        self._deeper()
        node = self._power()
        while self._begins_factor() and not self._next("function"):
            if self._next("number"):
                raise NotUnderstood("a product without a sign is not clear")
            node = Call("*", (node, self._power()))
        self._depth -= 1
        return node

    def _begins_factor(self) -> bool:
        if not self.left:
            return False
        token = self._tokens[self._at]
        if token.kind == "command":
            return token.text != "end"
        return token.kind != "mark" or token.text in _BEGIN_FACTOR or (token.text == "|" and not self._in_bars)

    def _next(self, kind: str) -> bool:
        return self._at < len(self._tokens) and self._tokens[self._at].kind == kind

    def _peek(self) -> str | None:
        return self._tokens[self._at].text if self._next("mark") else None

    def _take(self, *marks: str) -> str | None:
        if (mark := self._peek()) is not None and mark in marks:
            self._at += 1
            return mark
        return None

    def _expect(self, mark: str) -> None:
        if self._take(mark) is None:
            raise NotUnderstood(f"{mark!r} is missing")

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise NotUnderstood("it is nested too deeply")


def _number(text: str) -> Fraction:
    mantissa, _, exponent = text.lower().partition("e")
    if len(exponent) > 5 or abs(int(exponent or 0)) > MOST_POWER_OF_TEN:
        raise NotUnderstood("a power of ten is too large")
    whole, _, decimals = mantissa.partition(".")
    return Fraction(int(whole + decimals or 0), 10 ** len(decimals)) * Fraction(10) ** int(exponent or 0)


def _is_proper_fraction(node: Node) -> bool:
    if not isinstance(node, Call) or node.operator != "/":
        return False
    top, bottom = node.arguments
    return isinstance(top, Number) and isinstance(bottom, Number) and 0 < top.value < bottom.value
