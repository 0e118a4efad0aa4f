"""Forms of a tree that are recognised before numbers are compared: ±, intervals, names that are given a value.

Answers in words are compared without case where that makes no difference.
"""

from fractions import Fraction

from napkin.grading.mathematics.expression import (
    CONSTANTS,
    EMPTY_SET,
    REALS,
    Call,
    Collection,
    Node,
    NotUnderstood,
    Number,
    Relation,
    Symbol,
    parts_of,
)

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
    """The set that is said in words; None for any other text."""
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
    """The interval that a chain such as 1 ≤ x < 2 or x > 3 says; None for anything else."""
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
