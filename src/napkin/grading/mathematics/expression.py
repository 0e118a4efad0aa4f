"""Trees of answers (numbers, symbols, operations, collections, relations) and arithmetic on them in bounded work.

Arithmetic is exact with fractions where it can be, else with 120 digits. A complex number is a pair; each part is a
Fraction, or a Decimal once a root or a function made it irrational. Results of 120 digits must lie between 1e-25 and
1e25, and differences that are neither 0 nor clearly different from 0 are refused: two numbers that agree in 90 digits
are equal, however an almost equal one was written.
"""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal, DivisionByZero, InvalidOperation, Overflow, localcontext
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
    """A text that is not a formula, such as the name of a day."""

    text: str


Node = Number | Symbol | Call | Collection | Relation | Words
CONSTANTS = frozenset({"pi", "e", "i", "infinity"})
REALS = "ℝ"
"""The name of the set of real numbers."""
EMPTY_SET = Collection("{", (), "}")


def parts_of(node: Node) -> tuple[Node, ...]:
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


DIGITS = 120
MOST_BITS = 8192
"""The most bits of an exact result's numerator and denominator."""
MOST_WORK = 30_000
"""Units of work in a comparison, each about a microsecond."""
_RANGE = 25
_EQUAL = Decimal("1e-90")
_CLOSE = Decimal("1e-25")
_SIMPLE = 10**40
_MOST_MIXED_BITS = 160
"""The most bits of a rational number in one operation with an irrational one."""

Real = Fraction | Decimal


class TooMuchWork(NotUnderstood):
    """A comparison has used up the work that it may take."""


class Undefined(Exception):
    """A number divided by zero, a logarithm of a number that is not positive, and the like."""


@dataclass(frozen=True)
class Complex:
    """A complex number."""

    real: Real
    imaginary: Real = Fraction(0)

    @property
    def is_real(self) -> bool:
        return self.imaginary == 0


ZERO, ONE = Complex(Fraction(0)), Complex(Fraction(1))


class Arithmetic:
    """Operations that count their work and raise NotUnderstood beyond the bound; to be used within `precision`."""

    def __init__(self, most_work: int = MOST_WORK) -> None:
        self._left = most_work
        self.context = Context(
            prec=DIGITS, rounding=ROUND_HALF_EVEN, traps=[DivisionByZero, InvalidOperation, Overflow]
        )

    def precision(self) -> AbstractContextManager[Context]:
        """Operators of Decimal, among them signs and abs, round to the precision of the context that is set."""
        return localcontext(self.context)

    def spend(self, work: int) -> None:
        self._left -= work
        if self._left < 0:
            raise TooMuchWork("it takes too much work")

    def add(self, one: Complex, other: Complex) -> Complex:
        return Complex(self._add(one.real, other.real), self._add(one.imaginary, other.imaginary))

    def negative(self, one: Complex) -> Complex:
        return Complex(-one.real, -one.imaginary)

    def multiply(self, one: Complex, other: Complex) -> Complex:
        if one.is_real and other.is_real:
            return Complex(self._multiply(one.real, other.real))
        real = self._add(self._multiply(one.real, other.real), -self._multiply(one.imaginary, other.imaginary))
        imaginary = self._add(self._multiply(one.real, other.imaginary), self._multiply(one.imaginary, other.real))
        return Complex(real, imaginary)

    def divide(self, one: Complex, other: Complex) -> Complex:
        """The quotient. Raises Undefined for a divisor of 0."""
        if other == ZERO or (other.real == 0 and other.imaginary == 0):
            raise Undefined
        if other.is_real:
            return Complex(self._divide(one.real, other.real), self._divide(one.imaginary, other.real))
        size = self._add(self._multiply(other.real, other.real), self._multiply(other.imaginary, other.imaginary))
        turned = self.multiply(one, Complex(other.real, -other.imaginary))
        return Complex(self._divide(turned.real, size), self._divide(turned.imaginary, size))

    def equal(self, one: Complex, other: Complex) -> bool:
        return self._equal(one.real, other.real) and self._equal(one.imaginary, other.imaginary)

    def real_of(self, value: Complex) -> Real:
        """A number that must be real. Raises NotUnderstood."""
        if not value.is_real:
            raise NotUnderstood("a function of a complex number is not supported")
        return value.real

    def decimal(self, value: Real) -> Decimal:
        """A number in 120 digits, within the range."""
        if isinstance(value, Decimal):
            return value
        self.spend(3)
        # sqrt(2 + 1e-100) would be sqrt(2) in 90 digits.
        if value.numerator.bit_length() + value.denominator.bit_length() > _MOST_MIXED_BITS:
            raise NotUnderstood("a number with many digits beside an irrational one is not compared")
        return self.bounded(self.context.divide(Decimal(value.numerator), Decimal(value.denominator)))

    def bounded(self, value: Decimal) -> Decimal:
        """A number of 120 digits, if it is within the range."""
        if value and not -_RANGE <= value.adjusted() <= _RANGE:
            raise NotUnderstood("an intermediate result is too large or too small to compare")
        return value

    def exact(self, value: Fraction) -> Fraction:
        """An exact number, if it is short enough."""
        bits = value.numerator.bit_length() + value.denominator.bit_length()
        self.spend(1 + bits // 64)
        if bits > 2 * MOST_BITS:
            raise NotUnderstood("a number has too many digits")
        return value

    def _add(self, one: Real, other: Real) -> Real:
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return self.exact(one + other)
        if one == 0 or other == 0:
            return one or other
        left, right = self.decimal(one), self.decimal(other)
        self.spend(2)
        total = self.context.add(left, right)
        size = max(abs(left), abs(right))
        if abs(total) <= size * _EQUAL:
            return Fraction(0)
        if abs(total) < size * _CLOSE:
            raise NotUnderstood("a difference is too small to compare")
        return self.bounded(total)

    def _multiply(self, one: Real, other: Real) -> Real:
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return self.exact(one * other)
        if one == 0 or other == 0:
            return Fraction(0)
        self.spend(3)
        return self.bounded(self.context.multiply(self.decimal(one), self.decimal(other)))

    def _divide(self, one: Real, other: Real) -> Real:
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return self.exact(one / other)
        if one == 0:
            return Fraction(0)
        self.spend(4)
        return self.bounded(self.context.divide(self.decimal(one), self.decimal(other)))

    def _equal(self, one: Real, other: Real) -> bool:
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return one == other
        # A rational number of a hundred digits may agree with an irrational one in ninety; a short one cannot.
        for each in (one, other):
            if isinstance(each, Fraction) and abs(each.numerator) * each.denominator > _SIMPLE:
                return False
        left, right = self.decimal(one), self.decimal(other)
        return abs(left - right) <= max(abs(left), abs(right)) * _EQUAL


def whole_number(value: Complex) -> int | None:
    """A number that is known to be whole; None for others."""
    if value.is_real and isinstance(value.real, Fraction) and value.real.denominator == 1:
        return value.real.numerator
    return None


def exact_root(value: int, degree: int) -> int | None:
    """The root of a whole number that is not negative, if that is whole."""
    if value < 2 or degree == 1:
        return value
    if degree >= value.bit_length():
        return None
    if degree == 2:
        root = math.isqrt(value)
        return root if root * root == value else None
    # Newton's method from above.
    root = 1 << -(-value.bit_length() // degree)
    while True:
        smaller = ((degree - 1) * root + value // root ** (degree - 1)) // degree
        if smaller >= root:
            break
        root = smaller
    return root if root**degree == value else None
