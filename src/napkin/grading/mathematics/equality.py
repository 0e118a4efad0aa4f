"""Compares two trees by what they say.

Numbers are compared exactly. Expressions with variables are compared by their values at points that a hash of both
texts chooses: rational ones, exactly; whoever writes an answer cannot know them.
"""

from collections.abc import Mapping
from fractions import Fraction
from hashlib import sha256

from napkin.grading.mathematics.evaluation import evaluate
from napkin.grading.mathematics.expression import (
    CONSTANTS,
    EMPTY_SET,
    REALS,
    Arithmetic,
    Call,
    Collection,
    Complex,
    Node,
    NotUnderstood,
    Number,
    Relation,
    Symbol,
    TooMuchWork,
    Undefined,
    Words,
    parts_of,
    variables_of,
)

MOST_VARIABLES = 12
# Numerators over 1024 from, and how far they go: between 0 and 1, above 1, and below 0.
_RANGES = ((64, 900),) * 3 + ((1100, 3000),) * 3 + ((-4000, 3000),) * 2
_FEWEST_POINTS = 3

Point = Mapping[str, Complex]


class Comparison:
    """Compares an answer with a reference; `seed` is a text that chooses the points."""

    def __init__(self, seed: str) -> None:
        self._seed, self._arithmetic = seed.encode("utf-8", "surrogatepass"), Arithmetic()

    def same(self, answer: Node, reference: Node) -> bool:
        """True if both are equal. Raises NotUnderstood if that cannot be decided."""
        with self._arithmetic.precision():
            return self._same(without_plus_minus(answer), without_plus_minus(reference))

    def rounds_to(self, node: Node, rounded: Fraction, decimals: int) -> bool:
        """True if a number is another with so many decimals, rounded or truncated. Raises NotUnderstood."""
        with self._arithmetic.precision():
            value = self._value(node, {})
            if value is None or not value.is_real:
                raise NotUnderstood("it is not a real number")
            exact, last = Fraction(value.real), Fraction(1, 10**decimals)
            return 2 * abs(exact - rounded) <= last or 0 <= abs(exact) - abs(rounded) < last

    def _same(self, answer: Node, reference: Node) -> bool:
        self._arithmetic.spend(8)
        answer, reference = as_interval(element_of(answer)), as_interval(element_of(reference))
        if isinstance(answer, Words) or isinstance(reference, Words):
            return (
                isinstance(answer, Words)
                and isinstance(reference, Words)
                and plain_words(answer.text) == plain_words(reference.text)
            )
        if isinstance(answer, Relation) or isinstance(reference, Relation):
            return self._same_relations(answer, reference)
        if isinstance(answer, Collection) or isinstance(reference, Collection):
            return self._same_collections(answer, reference)
        return self._same_numbers(answer, reference)

    def _same_relations(self, answer: Node, reference: Node) -> bool:
        """x = 5 is 5; y = 2x + 1 is 2x - y + 1 = 0; x > 3 is (3, ∞)."""
        said, wanted = self._value_said(answer), self._value_said(reference)
        if said is not None and wanted is not None:
            (name, value), (wanted_name, wanted_value) = said, wanted
            if (name == wanted_name or not (name and wanted_name)) and self._same(value, wanted_value):
                return True
        if not isinstance(answer, Relation) or not isinstance(reference, Relation):
            interval = interval_of(answer) or interval_of(reference)
            other = reference if isinstance(answer, Relation) else answer
            if interval is not None and isinstance(other, Collection) and is_interval(other):
                return self._same(interval, other)
            return False
        if answer.relations != reference.relations:
            return False
        if answer.relations == ("=",):
            return self._same_equations(answer, reference)
        if self._all_same(answer.sides, reference.sides):
            return True
        return answer.relations == ("≠",) and self._all_same(answer.sides, reference.sides[::-1])

    def _value_said(self, node: Node) -> tuple[str, Node] | None:
        """A name and the value that a node gives it: ("x", 5) of x = 5 and of x = 10/2 = 5, ("", 5) of 5; None if it is
        not such a statement. Raises NotUnderstood for one that is wrong, such as 5 = 7."""
        if not isinstance(node, Relation):
            return "", node
        if set(node.relations) != {"="}:
            return None
        name = named_value(node.sides[0])
        values = node.sides if name is None else node.sides[1:]
        if name is None and any(variables_of(value) for value in values):
            return None
        if name is not None and any(name in variables_of(value) for value in values):
            return None
        for value in values[:-1]:
            if not self._same(value, values[-1]):
                raise NotUnderstood("it says that different numbers are equal")
        return name or "", values[-1]

    def _same_equations(self, answer: Relation, reference: Relation) -> bool:
        """Both sides' difference is that of the other by a constant factor."""
        if any(not _is_number(side) for side in (*answer.sides, *reference.sides)):
            return self._all_same(answer.sides, reference.sides)
        one, other = (Call("-", (each.sides[0], each.sides[1])) for each in (answer, reference))
        pairs = self._values(one, other)
        if pairs is None:
            return False
        first, second = pairs[0]
        multiply = self._arithmetic.multiply
        for left, right in pairs:
            # An equation that always holds carries no information.
            if _is_zero(left) or _is_zero(right):
                return False
            if not self._arithmetic.equal(multiply(left, second), multiply(right, first)):
                return False
        return True

    def _same_collections(self, answer: Node, reference: Node) -> bool:
        if not isinstance(answer, Collection) or not isinstance(reference, Collection):
            return False
        kinds = {answer.opening, reference.opening}
        if len(answer.items) != len(reference.items):
            return False
        if kinds <= {"", "{"} or kinds == {"∪"}:
            return self._same_in_any_order(answer.items, reference.items)
        if (answer.opening, answer.closing) != (reference.opening, reference.closing):
            return False
        return self._all_same(answer.items, reference.items)

    def _same_in_any_order(self, answer: tuple[Node, ...], reference: tuple[Node, ...]) -> bool:
        left = list(reference)
        for item in answer:
            place = next((place for place, other in enumerate(left) if self._same(item, other)), None)
            if place is None:
                return False
            del left[place]
        return True

    def _all_same(self, answer: tuple[Node, ...], reference: tuple[Node, ...]) -> bool:
        return len(answer) == len(reference) and all(map(self._same, answer, reference))

    def _same_numbers(self, answer: Node, reference: Node) -> bool:
        if answer == reference:
            return True
        infinities = signed_infinity(answer), signed_infinity(reference)
        if infinities != (None, None):
            return infinities[0] == infinities[1]
        if any(isinstance(each, Call) and each.operator == "base" for each in (answer, reference)):
            return False
        # 30° is 30, for the sign is often left out, as it is π/6.
        for one, other in ((answer, reference), (reference, answer)):
            bare = isinstance(one, Call) and one.operator == "degrees" and isinstance(other, Number)
            if bare and isinstance(one, Call) and self._same_numbers(one.arguments[0], other):
                return True
        pairs = self._values(answer, reference)
        return pairs is not None and all(self._arithmetic.equal(left, right) for left, right in pairs)

    def _values(self, one: Node, other: Node) -> list[tuple[Complex, Complex]] | None:
        """The values of both at points where they have some; None if only one has, or if there are too few."""
        names = sorted(variables_of(one) | variables_of(other))
        if len(names) > MOST_VARIABLES:
            raise NotUnderstood("it has too many variables")
        points: list[Point] = [self._point(names, number) for number in range(len(_RANGES))] if names else [{}]
        numbers = []
        for point in points:
            try:
                values = [self._value(node, point) for node in (one, other)]
            except TooMuchWork:
                raise
            except NotUnderstood:
                if not names:
                    raise
                continue
            if values[0] is None or values[1] is None:
                if values != [None, None]:
                    return None
                continue
            numbers.append((values[0], values[1]))
        return numbers if len(numbers) >= (_FEWEST_POINTS if names else 1) else None

    def _value(self, node: Node, point: Point) -> Complex | None:
        try:
            return evaluate(node, point, self._arithmetic)
        except Undefined:
            return None

    def _point(self, names: list[str], number: int) -> Point:
        start, length = _RANGES[number]

        def drawn(name: str) -> Complex:
            digest = sha256(f"{number}/{name}/".encode() + self._seed).digest()
            return Complex(Fraction(start + int.from_bytes(digest[:8], "big") % length, 1024))

        return {name: drawn(name) for name in names}


def _is_number(node: Node) -> bool:
    """True for one number or expression, without collections and words in it."""
    return not isinstance(node, Collection | Relation | Words) and all(_is_number(part) for part in parts_of(node))


def _is_zero(value: Complex) -> bool:
    return value.real == 0 and value.imaginary == 0


# Forms of a tree that are recognised before numbers are compared: ±, intervals, names that are given a value.
#
# Answers in words are compared without case where that makes no difference.

_WHATEVER_THEIR_CASE = frozenset({"yes", "no", "true", "false", "none"})


def plain_words(text: str) -> str:
    """Words with a space between and without a full stop; a capital at the beginning of a word does not count.

    AB and ab stay different, for letters may be points or variables.

    >>> plain_words(" No  Solution."), plain_words("AB"), plain_words("YES")
    ('no solution', 'AB', 'yes')
    """
    return " ".join(map(_folded, text.split())).strip(" .")


def _folded(word: str) -> str:
    lower = word.lower()
    is_word = len(word) > 2 and word[1:].islower()
    return lower if is_word or lower.strip(".") in _WHATEVER_THEIR_CASE else word


PLUS_MINUS = "plus-minus"
_REALS_IN_WORDS = ("all real numbers", "all reals", "the real numbers", "all real numbers x")
_NOTHING_IN_WORDS = ("empty set", "the empty set")
_FUNCTION_NAMES = ("f", "g", "h", "p", "P", "Q", "F", "G")


def without_plus_minus(node: Node) -> Node:
    """a ± b as the list of a + b and a - b. Raises NotUnderstood for several signs in one item."""
    if isinstance(node, Collection) and node.opening in ("", "{"):
        items = [each for item in node.items for each in _both(item)]
        return Collection(node.opening, tuple(items), node.closing)
    both = _both(node)
    return both[0] if len(both) == 1 else Collection("", tuple(both), "")


def _both(node: Node) -> list[Node]:
    count = _count(node)
    if count == 0:
        return [node]
    if count > 1 or isinstance(node, Collection):
        raise NotUnderstood("several ± are not clear")
    return [_with_sign(node, sign) for sign in "+-"]


def _count(node: Node) -> int:
    own = isinstance(node, Call) and node.operator == PLUS_MINUS
    return own + sum(_count(part) for part in parts_of(node))


def _with_sign(node: Node, sign: str) -> Node:
    if isinstance(node, Call):
        operator = sign if node.operator == PLUS_MINUS else node.operator
        return Call(operator, tuple(_with_sign(part, sign) for part in node.arguments))
    if isinstance(node, Relation):
        return Relation(tuple(_with_sign(side, sign) for side in node.sides), node.relations)
    return node


def signed_infinity(node: Node) -> int | None:
    """1 for infinity, -1 for its negative, None for anything else."""
    if node == Symbol("infinity"):
        return 1
    if isinstance(node, Call) and node.operator == "negative" and node.arguments == (Symbol("infinity"),):
        return -1
    return None


def named_value(node: Node) -> str | None:
    """The name on the left of x = 5, f(x) = 5 or (x, y) = (1, 2); None for anything else."""
    if isinstance(node, Collection) and (node.opening, node.closing) == ("(", ")"):
        names = [named_value(each) for each in node.items]
        return None if None in names else ",".join(map(str, names))
    if isinstance(node, Symbol) and node.name not in CONSTANTS:
        return node.name
    if isinstance(node, Call) and node.operator == "*":
        name, variable = node.arguments
        if isinstance(variable, Symbol) and isinstance(name, Symbol) and name.name in _FUNCTION_NAMES:
            return f"{name.name}()"
    return None


def element_of(node: Node) -> Node:
    """The collection of x ∈ [1, 2]; another node as it is."""
    if isinstance(node, Relation) and node.relations == ("∈",) and named_value(node.sides[0]) is not None:
        return node.sides[1]
    return node


def as_interval(node: Node) -> Node:
    """All real numbers, by whatever name, as the interval that they are; another node as it is."""
    if node == Symbol(REALS):
        return Collection("(", (Call("negative", (Symbol("infinity"),)), Symbol("infinity")), ")")
    return node


def set_in_words(text: str) -> Node | None:
    """The set that a text names in words; None for any other text."""
    words = plain_words(text)
    if words in _REALS_IN_WORDS:
        return Symbol(REALS)
    return EMPTY_SET if words in _NOTHING_IN_WORDS else None


def is_interval(node: Collection) -> bool:
    """True for brackets that can only be an interval's: (1, 2) may be a point."""
    if node.opening == "∪":
        return all(isinstance(each, Collection) and each.opening in "([" for each in node.items)
    if node.opening not in ("(", "[") or len(node.items) != 2:
        return False
    return (node.opening, node.closing) != ("(", ")") or any(signed_infinity(each) for each in node.items)


def interval_of(node: Node) -> Collection | None:
    """The interval described by a chain such as 1 ≤ x < 2 or x > 3; None for anything else."""
    if not isinstance(node, Relation) or not set(node.relations) <= {"<", "≤"}:
        return None
    named = [place for place, side in enumerate(node.sides) if named_value(side) is not None]
    if len(named) != 1:
        return None
    infinity = Symbol("infinity")
    sides, relations, place = node.sides, node.relations, named[0]
    if len(sides) == 2 and place == 0:
        return Collection("(", (Call("negative", (infinity,)), sides[1]), _bracket(relations[0], "]"))
    if len(sides) == 2:
        return Collection(_bracket(relations[0], "["), (sides[0], infinity), ")")
    if len(sides) == 3 and place == 1:
        return Collection(_bracket(relations[0], "["), (sides[0], sides[2]), _bracket(relations[1], "]"))
    return None


def _bracket(relation: str, closed: str) -> str:
    return closed if relation == "≤" else {"[": "(", "]": ")"}[closed]


def scaled(node: Node, factor: Fraction) -> Node:
    """A number times a factor; of x = 5 the 5. Raises NotUnderstood for collections."""
    if isinstance(node, Relation) and set(node.relations) == {"="}:
        return Relation((*node.sides[:-1], scaled(node.sides[-1], factor)), node.relations)
    if isinstance(node, Collection | Relation):
        raise NotUnderstood("several numbers with a unit are not compared")
    return Call("*", (node, Number(factor)))
