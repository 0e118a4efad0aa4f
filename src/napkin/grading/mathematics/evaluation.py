"""The value of a tree, given numbers for its variables.

Elementary functions of real numbers have 120 digits, by series whose length is bounded by the digits. Where a value is
a whole number or a half, as the sine of a sixth of a half turn, it is recognised: the series is within 1e-90 of it,
which does not happen by chance with 120 digits.
"""

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from napkin.grading.mathematics.expression import (
    MOST_BITS,
    ONE,
    ZERO,
    Arithmetic,
    Call,
    Complex,
    Node,
    NotUnderstood,
    Number,
    Real,
    Symbol,
    Undefined,
    exact_root,
    whole_number,
)

_MOST_ARGUMENT = 10**6
_SPENT = 300
_NOTHING = Decimal("1e-130")
_SAME = Decimal("1e-90")


@lru_cache
def _pi_digits() -> Decimal:
    """Machin's formula: pi = 16 arctan(1/5) - 4 arctan(1/239), in whole numbers."""
    unit = 10**140

    def arctangent_of_inverse(number: int) -> int:
        total = term = unit // number
        n, sign = 3, -1
        while term:
            term //= number * number
            total += sign * (term // n)
            n, sign = n + 2, -sign
        return total

    digits = 16 * arctangent_of_inverse(5) - 4 * arctangent_of_inverse(239)
    # Made from a text, because operations round to the current precision.
    return Decimal(f"{digits}e-140")


def pi(arithmetic: Arithmetic) -> Decimal:
    return arithmetic.context.plus(_pi_digits())


def exponential(value: Real, arithmetic: Arithmetic) -> Real:
    if value == 0:
        return Fraction(1)
    if abs(value) > 60:
        raise NotUnderstood("a power of e is too large or too small")
    arithmetic.spend(_SPENT)
    return _rational_if_it_is(arithmetic.bounded(arithmetic.context.exp(arithmetic.decimal(value))), arithmetic)


def logarithm(value: Real, arithmetic: Arithmetic) -> Real:
    """The natural logarithm. Raises Undefined for numbers that are not positive."""
    if value <= 0:
        raise Undefined
    if value == 1:
        return Fraction(0)
    arithmetic.spend(_SPENT)
    return _rational_if_it_is(arithmetic.bounded(arithmetic.context.ln(arithmetic.decimal(value))), arithmetic)


def sine(value: Real, arithmetic: Arithmetic) -> Real:
    if value == 0:
        return Fraction(0)
    if abs(value) > _MOST_ARGUMENT:
        raise NotUnderstood("an angle is too large")
    arithmetic.spend(_SPENT)
    context = arithmetic.context
    turn = context.multiply(_pi_digits(), Decimal(2))
    angle = context.remainder_near(arithmetic.decimal(value), turn)
    total = term = angle
    square, n = context.multiply(angle, angle), 1
    while abs(term) > _NOTHING:
        n += 2
        term = -context.divide(context.multiply(term, square), Decimal(n * (n - 1)))
        total = context.add(total, term)
    return _rational_if_it_is(total, arithmetic)


def cosine(value: Real, arithmetic: Arithmetic) -> Real:
    if value == 0:
        return Fraction(1)
    quarter = arithmetic.context.divide(_pi_digits(), Decimal(2))
    return sine(arithmetic.context.add(arithmetic.decimal(value), quarter), arithmetic)


def arctangent(value: Real, arithmetic: Arithmetic) -> Real:
    """The arctangent: the argument is halved until the series is short."""
    if value == 0:
        return Fraction(0)
    arithmetic.spend(_SPENT)
    context = arithmetic.context
    argument, doubled = arithmetic.decimal(value), 0
    # arctan x = 2 arctan(x / (1 + sqrt(1 + x²)))
    while abs(argument) > Decimal("0.05"):
        length = context.sqrt(context.add(Decimal(1), context.multiply(argument, argument)))
        argument = context.divide(argument, context.add(Decimal(1), length))
        doubled += 1
    square, power, total, n = context.multiply(argument, argument), argument, argument, 1
    while abs(power) > _NOTHING:
        n += 2
        power = -context.multiply(power, square)
        total = context.add(total, context.divide(power, Decimal(n)))
    return _rational_if_it_is(context.multiply(total, Decimal(2**doubled)), arithmetic)


def arcsine(value: Real, arithmetic: Arithmetic) -> Real:
    """The arcsine, by the arctangent. Raises Undefined beyond -1 to 1."""
    if abs(value) > 1:
        raise Undefined
    context = arithmetic.context
    if abs(value) == 1:
        return context.divide(context.multiply(_pi_digits(), Decimal(int(value))), Decimal(2))
    number = arithmetic.decimal(value)
    rest = context.sqrt(context.subtract(Decimal(1), context.multiply(number, number)))
    return arctangent(context.divide(number, rest), arithmetic)


def arccosine(value: Real, arithmetic: Arithmetic) -> Real:
    if value == 1:
        return Fraction(0)
    quarter = arithmetic.context.divide(_pi_digits(), Decimal(2))
    angle = arithmetic.context.subtract(quarter, arithmetic.decimal(arcsine(value, arithmetic)))
    return _rational_if_it_is(angle, arithmetic)


def _rational_if_it_is(value: Decimal, arithmetic: Arithmetic) -> Real:
    for denominator in (1, 2):
        numerator = round(value * denominator)
        if abs(value * denominator - numerator) < _SAME:
            return Fraction(numerator, denominator)
    return arithmetic.bounded(value)


def _quotient(
    top: Callable[[Real, Arithmetic], Real], bottom: Callable[[Real, Arithmetic], Real]
) -> Callable[[Real, Arithmetic], Real]:
    def divided(value: Real, arithmetic: Arithmetic) -> Real:
        below = bottom(value, arithmetic)
        if below == 0:
            raise Undefined
        above = top(value, arithmetic)
        if isinstance(above, Fraction) and isinstance(below, Fraction):
            return above / below
        quotient = arithmetic.context.divide(arithmetic.decimal(above), arithmetic.decimal(below))
        return _rational_if_it_is(quotient, arithmetic)

    return divided


def _one(value: Real, arithmetic: Arithmetic) -> Real:
    return Fraction(1)


def _hyperbolic(sign: int) -> Callable[[Real, Arithmetic], Real]:
    def half_sum(value: Real, arithmetic: Arithmetic) -> Real:
        up, down = exponential(value, arithmetic), exponential(-value, arithmetic)
        if value == 0:
            return Fraction(1 + sign, 2)
        total = arithmetic.context.add(arithmetic.decimal(up), sign * arithmetic.decimal(down))
        return arithmetic.bounded(arithmetic.context.divide(total, Decimal(2)))

    return half_sum


FUNCTIONS: dict[str, Callable[[Real, Arithmetic], Real]] = {
    "sin": sine,
    "cos": cosine,
    "tan": _quotient(sine, cosine),
    "cot": _quotient(cosine, sine),
    "sec": _quotient(_one, cosine),
    "csc": _quotient(_one, sine),
    "arcsin": arcsine,
    "arccos": arccosine,
    "arctan": arctangent,
    "sinh": _hyperbolic(-1),
    "cosh": _hyperbolic(1),
    "tanh": _quotient(_hyperbolic(-1), _hyperbolic(1)),
    "exp": exponential,
    "ln": logarithm,
}


MOST_FACTORIAL = 400
MOST_POWER = 4096
"""The largest exponent of an inexact number; of exact ones the length of the result is bounded."""

I = Complex(Fraction(0), Fraction(1))  # noqa: E741


def evaluate(node: Node, values: Mapping[str, Complex], arithmetic: Arithmetic) -> Complex:
    """The value of a tree of one number.

    Raises NotUnderstood for collections, words, and what exceeds the bounds, Undefined where it has no value.
    """
    arithmetic.spend(1)
    if isinstance(node, Number):
        return Complex(node.value)
    if isinstance(node, Symbol):
        return _symbol(node.name, values, arithmetic)
    if not isinstance(node, Call):
        raise NotUnderstood("it is not a number")
    if node.operator == "base":
        raise NotUnderstood("a numeral of another base is not computed with")
    arguments = [evaluate(argument, values, arithmetic) for argument in node.arguments]
    return _applied(node.operator, arguments, arithmetic)


def _symbol(name: str, values: Mapping[str, Complex], arithmetic: Arithmetic) -> Complex:
    if name == "i":
        return I
    if name == "pi":
        return Complex(pi(arithmetic))
    if name == "e":
        return Complex(exponential(Fraction(1), arithmetic))
    if name not in values:
        raise NotUnderstood(f"{name} has no value")
    return values[name]


def _applied(operator: str, arguments: list[Complex], arithmetic: Arithmetic) -> Complex:
    if operator in _OPERATIONS:
        return _OPERATIONS[operator](arithmetic, *arguments)
    return _function(operator, arguments[0], arithmetic)


def _function(name: str, value: Complex, arithmetic: Arithmetic) -> Complex:
    if name == "abs" and not value.is_real:
        squares = (arithmetic.multiply(Complex(each), Complex(each)) for each in (value.real, value.imaginary))
        return root(arithmetic.add(*squares), 2, arithmetic)
    real = arithmetic.real_of(value)
    if name == "abs":
        return Complex(abs(real))
    if name in ("floor", "ceil"):
        # 120 digits are enough: what is nearly whole was refused, or is known to be whole.
        nearest = round(real)
        if not isinstance(real, Fraction) and abs(real - nearest) < Decimal("1e-60"):
            raise NotUnderstood("it is not clear on which side of a whole number it is")
        return Complex(Fraction(math.floor(real) if name == "floor" else math.ceil(real)))
    if name not in FUNCTIONS:
        raise NotUnderstood(f"{name} is not computed")
    return Complex(FUNCTIONS[name](real, arithmetic))


def _logarithm(arithmetic: Arithmetic, value: Complex, base: Complex | None = None) -> Complex:
    number = whole_number(value)
    if base is None and number is not None and number > 1 and number.bit_length() < 4000:
        digits = len(str(number)) - 1
        if number == 10**digits:
            return Complex(Fraction(digits))
    below = None if base is None else logarithm(arithmetic.real_of(base), arithmetic)
    above = logarithm(arithmetic.real_of(value), arithmetic)
    below = logarithm(Fraction(10), arithmetic) if below is None else below
    return arithmetic.divide(Complex(above), Complex(below))


def power(base: Complex, exponent: Complex, arithmetic: Arithmetic) -> Complex:
    """A power: exact where base and exponent are and the result is short enough."""
    if not exponent.is_real:
        raise NotUnderstood("a complex power is not supported")
    if (times := whole_number(exponent)) is not None:
        return _whole_power(base, times, arithmetic)
    if isinstance(exponent.real, Fraction) and exponent.real.denominator <= 1000:
        rooted = root(base, exponent.real.denominator, arithmetic)
        return _whole_power(rooted, exponent.real.numerator, arithmetic)
    real = arithmetic.real_of(base)
    if real <= 0:
        raise Undefined
    logarithmic = arithmetic.multiply(Complex(logarithm(real, arithmetic)), exponent)
    return Complex(exponential(logarithmic.real, arithmetic))


def _whole_power(base: Complex, times: int, arithmetic: Arithmetic) -> Complex:
    if times < 0:
        return arithmetic.divide(ONE, _whole_power(base, -times, arithmetic))
    if base.is_real and isinstance(base.real, Fraction):
        largest = max(abs(base.real.numerator), base.real.denominator)
        # 0, 1 and -1 have short powers, whatever the exponent.
        if largest > 1 and largest.bit_length() * times > 2 * MOST_BITS:
            raise NotUnderstood("a power is too large")
        if largest <= 1:
            times = times % 2 + 2 * (times > 1)
        return Complex(arithmetic.exact(base.real**times))
    if times > MOST_POWER:
        raise NotUnderstood("a power is too large")
    result = ONE
    while times:
        if times % 2:
            result = arithmetic.multiply(result, base)
        times //= 2
        if times:
            base = arithmetic.multiply(base, base)
    return result


def root(value: Complex, degree: int, arithmetic: Arithmetic) -> Complex:
    """The root of a real number: real for an odd degree, with a positive imaginary part for a square root."""
    real = arithmetic.real_of(value)
    if real == 0:
        return ZERO
    if degree == 1:
        return value
    if real < 0:
        if degree % 2:
            return arithmetic.negative(root(arithmetic.negative(value), degree, arithmetic))
        if degree == 2:
            return arithmetic.multiply(I, root(Complex(-real), 2, arithmetic))
        raise Undefined
    if isinstance(real, Fraction):
        arithmetic.spend(5 + (real.numerator.bit_length() + real.denominator.bit_length()) // 16)
        top, bottom = exact_root(real.numerator, degree), exact_root(real.denominator, degree)
        if top is not None and bottom is not None:
            return Complex(Fraction(top, bottom))
    number = arithmetic.decimal(real)
    if degree == 2:
        arithmetic.spend(10)
        return Complex(arithmetic.bounded(arithmetic.context.sqrt(number)))
    logarithmic = arithmetic.context.divide(arithmetic.decimal(logarithm(number, arithmetic)), Decimal(degree))
    return Complex(exponential(logarithmic, arithmetic))


def _root(arithmetic: Arithmetic, value: Complex, degree: Complex) -> Complex:
    number = whole_number(degree)
    if number is None or not 1 <= number <= 1000:
        raise NotUnderstood("the degree of a root is not a small whole number")
    return root(value, number, arithmetic)


def _counted(operator: str, count: Callable[..., int]) -> Callable[..., Complex]:
    def counted(arithmetic: Arithmetic, *arguments: Complex) -> Complex:
        numbers = [whole_number(each) for each in arguments]
        known = [each for each in numbers if each is not None and 0 <= each <= MOST_FACTORIAL]
        if len(known) < len(numbers):
            raise NotUnderstood(f"a {operator} is not of small whole numbers")
        arithmetic.spend(50)
        return Complex(arithmetic.exact(Fraction(count(*known))))

    return counted


def _degrees(arithmetic: Arithmetic, value: Complex) -> Complex:
    return arithmetic.multiply(value, arithmetic.divide(Complex(pi(arithmetic)), Complex(Fraction(180))))


_OPERATIONS: dict[str, Callable[..., Complex]] = {
    "+": Arithmetic.add,
    "-": lambda arithmetic, one, other: arithmetic.add(one, arithmetic.negative(other)),
    "*": Arithmetic.multiply,
    "/": Arithmetic.divide,
    "^": lambda arithmetic, base, exponent: power(base, exponent, arithmetic),
    "negative": Arithmetic.negative,
    "sqrt": lambda arithmetic, value: root(value, 2, arithmetic),
    "root": _root,
    "radians": lambda arithmetic, value: value,
    "degrees": _degrees,
    "factorial": _counted("factorial", math.factorial),
    "binom": _counted("binom", math.comb),
    "log": _logarithm,
}
