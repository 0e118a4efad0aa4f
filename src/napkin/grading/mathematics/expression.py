"""What an answer is once it has been read: numbers, symbols, operations, collections and relations."""

from dataclasses import dataclass
from fractions import Fraction


class NotUnderstood(Exception):
    """A text is no answer that can be compared, or comparing it would take more work than it may."""


@dataclass(frozen=True)
class Number:
    """A rational number."""

    value: Fraction


@dataclass(frozen=True)
class Symbol:
    """A variable, or one of the constants pi, e, i and infinity."""

    name: str


@dataclass(frozen=True)
class Call:
    """An operation or function: + - * / ^ negative plus-minus factorial degrees sqrt sin ..."""

    operator: str
    arguments: tuple["Node", ...]


@dataclass(frozen=True)
class Collection:
    """Several items: a tuple or interval by its brackets, a set in braces, a list without brackets, a union."""

    opening: str
    """( [ { < ∪ or nothing."""
    items: tuple["Node", ...]
    closing: str


@dataclass(frozen=True)
class Relation:
    """Sides with the relations between them: = < ≤ ≠ ∈."""

    sides: tuple["Node", ...]
    relations: tuple[str, ...]


@dataclass(frozen=True)
class Words:
    """A text that is no formula, such as the name of a day."""

    text: str


Node = Number | Symbol | Call | Collection | Relation | Words
CONSTANTS = frozenset({"pi", "e", "i", "infinity"})
REALS = "ℝ"
"""The name of the set of real numbers."""
EMPTY_SET = Collection("{", (), "}")


def parts_of(node: Node) -> tuple[Node, ...]:
    """What a node is made of."""
    if isinstance(node, Call):
        return node.arguments
    if isinstance(node, Collection):
        return node.items
    return node.sides if isinstance(node, Relation) else ()


def variables_of(node: Node) -> set[str]:
    """The names in a node whose value is not known."""
    if isinstance(node, Symbol):
        return set() if node.name in CONSTANTS else {node.name}
    return set[str]().union(*(variables_of(part) for part in parts_of(node)))
