"""Elementary functions of real numbers in 120 digits, with series whose length is bounded by the digits.

Where a value is a whole number or a half, as the sine of a sixth of a half turn, it is found to be: within 1e-90 of it,
where 120 digits of a series do not come by chance.
"""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from napkin.grading.mathematics.bounded_numbers import Arithmetic, Real, Undefined
from napkin.grading.mathematics.expression import NotUnderstood

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
    # Of a text, for operations round to the precision of the moment.
    return Decimal(f"{digits}e-140")


def pi(arithmetic: Arithmetic) -> Decimal:
    """The circle's number."""
    return arithmetic.context.plus(_pi_digits())


def exponential(value: Real, arithmetic: Arithmetic) -> Real:
    """e to a power."""
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
    """The sine of an angle in radians."""
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
    """The cosine of an angle in radians."""
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
    """The arccosine."""
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
