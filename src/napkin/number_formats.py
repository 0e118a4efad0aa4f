"""Number formats: the bits of each field, the range and resolution that follow from them, and rounding.

A floating-point format with e exponent bits, f fraction bits and bias b = 2^(e-1) - 1 holds the numbers

    (-1)^sign · 1.fraction · 2^(exponent - b)      normal
    (-1)^sign · 0.fraction · 2^(1 - b)             subnormal (exponent field 0)

All figures here are computed from that layout (IEEE 754-2019, section 3.4) with Python's exact integers and
fractions. The top exponent is reserved for infinity and NaN, except in E4M3, which has no infinity and whose
only NaN is the largest pattern (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", table 1), and in fp4, which
has neither: all of its 16 patterns are numbers (Open Compute Project 2023, "OCP Microscaling Formats (MX)", table 5).

fp4 is the element of two block formats, in which neighbours share a scale that is not part of the figures here: mxfp4
has a power of two for each 32 numbers (4.25 bits per number), nvfp4 an E4M3 number for each 16 (4.5 bits).
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from napkin.errors import NapkinError, near_names


@dataclass(frozen=True)
class NumberFormat:
    """One number format; `exponent_bits` is 0 for two's-complement integers.

    `bits` are the bits of a number in memory. They exceed sign + exponent + fraction only for tf32, which is stored
    in a 32-bit word whose 13 lowest bits the matrix units ignore. `torch_name` is the dtype's name in torch, None if
    torch has no such dtype.
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    bits: int
    torch_name: str | None
    has_infinity: bool = True
    sign_bits: int = 1
    has_nan: bool = True

    @property
    def is_integer(self) -> bool:
        """True where the numbers are integers, evenly spaced, rather than floating-point."""
        return self.exponent_bits == 0

    @property
    def bytes(self) -> float:
        """Bytes of a number in memory: a half for int4 and fp4, two of which share a byte."""
        return self.bits / 8

    @property
    def bias(self) -> int:
        """The number that is subtracted from the exponent field; 0 for integers."""
        return 0 if self.is_integer else 2 ** (self.exponent_bits - 1) - 1

    @property
    def smallest_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        return 0 if self.is_integer else 1 - self.bias

    @property
    def largest(self) -> float:
        """The largest finite number."""
        if self.is_integer:
            return float(2**self.fraction_bits - 1)
        if self.has_infinity:
            return float((2 - Fraction(1, 2**self.fraction_bits)) * Fraction(2) ** self.bias)
        # The top exponent holds numbers too; if its last fraction is NaN, the last but one is the largest.
        not_numbers = 1 if self.has_nan else 0
        return float((2 - Fraction(1 + not_numbers, 2**self.fraction_bits)) * Fraction(2) ** (self.bias + 1))

    @property
    def lowest(self) -> float:
        """The most negative finite number: one further than -largest for two's-complement integers."""
        return -self.largest - 1 if self.is_integer else -self.largest

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with full resolution; 1 for integers."""
        return float(Fraction(2) ** self.smallest_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number; 1 for integers."""
        return 1.0 if self.is_integer else float(Fraction(2) ** (self.smallest_exponent - self.fraction_bits))

    @property
    def resolution(self) -> float:
        """The distance from 1 to the next larger number (machine epsilon); 1 for integers."""
        return 1.0 if self.is_integer else float(Fraction(1, 2**self.fraction_bits))


@dataclass(frozen=True)
class Rounded:
    """A number rounded to a format: its bit pattern, its value, and its errors.

    `underflow` is True if a number other than zero became zero, `overflow` if it rounds beyond the largest finite
    number. After an overflow to infinity both errors are infinite.
    """

    bits: int
    value: float
    absolute_error: float
    relative_error: float
    underflow: bool
    overflow: bool


FORMATS: dict[str, NumberFormat] = {
    number_format.name: number_format
    for number_format in (
        NumberFormat("fp64", 11, 52, 64, "float64"),
        NumberFormat("fp32", 8, 23, 32, "float32"),
        NumberFormat("tf32", 8, 10, 32, None),
        NumberFormat("fp16", 5, 10, 16, "float16"),
        NumberFormat("bf16", 8, 7, 16, "bfloat16"),
        NumberFormat("fp8-e4m3", 4, 3, 8, "float8_e4m3fn", has_infinity=False),
        NumberFormat("fp8-e5m2", 5, 2, 8, "float8_e5m2"),
        # torch only has a type for pairs of them, which it cannot cast to.
        NumberFormat("fp4", 2, 1, 4, None, has_infinity=False, has_nan=False),
        NumberFormat("int8", 0, 7, 8, "int8", has_infinity=False, has_nan=False),
        NumberFormat("int4", 0, 3, 4, None, has_infinity=False, has_nan=False),
    )
}

_ALIASES = {
    **{name.replace("-", ""): name for name in FORMATS},
    **{str(known.torch_name).replace("_", ""): known.name for known in FORMATS.values() if known.torch_name},
    "double": "fp64",
    "float": "fp32",
    "single": "fp32",
    "half": "fp16",
    "brain": "bf16",
    "fp8": "fp8-e4m3",
    "e4m3": "fp8-e4m3",
    "e4m3fn": "fp8-e4m3",
    "fp8e4m3fn": "fp8-e4m3",
    "float8e4m3": "fp8-e4m3",
    "e5m2": "fp8-e5m2",
    "e2m1": "fp4",
    "fp4e2m1": "fp4",
    "float4": "fp4",
    "float4e2m1fn": "fp4",
    "mxfp4": "fp4",
    "nvfp4": "fp4",
}


def find_format(name: str) -> NumberFormat:
    """The number format of that name: napkin's own, torch's ("bfloat16") or a common one ("half").

    Upper and lower case, "-" and "_" are alike; a bare "fp8" means E4M3, the format of weights and
    activations; "mxfp4" and "nvfp4" mean their elements, fp4. Raises NapkinError for any other name.

    >>> find_format("bfloat16").name, find_format("FP8_E5M2").largest
    ('bf16', 57344.0)
    """
    plain = name.lower().removeprefix("torch.").replace("-", "").replace("_", "").replace(" ", "")
    if plain in _ALIASES:
        return FORMATS[_ALIASES[plain]]
    near = near_names(plain, _ALIASES)
    hint = f" (did you mean {_ALIASES[near[0]]}?)" if near else ""
    raise NapkinError(f"{name!r} is not a number format{hint}: use one of {', '.join(FORMATS)}")


def round_to(value: float | int, format: NumberFormat | str) -> Rounded:
    """Round a number to a format, to the nearest and on a tie to the even neighbour, exactly.

    Beyond the largest finite number, formats with an infinity give that infinity; E4M3, fp4 and the integers
    saturate: they give their largest number. That is what torch's casts do (since 2.13; they gave NaN in E4M3
    before), except that its casts to integers wrap around. The sign of zero is kept and NaN stays NaN; raises
    NapkinError for NaN in a format that has none: fp4 and the integers.

    >>> round_to(1e-8, "fp16").value, round_to(0.1, "bf16").value, round_to(70000, "fp16").value
    (0.0, 0.10009765625, inf)
    """
    target = find_format(format) if isinstance(format, str) else format
    if math.isnan(value):
        return _nan(target)
    if math.isinf(value):
        return _beyond(value, target)
    if target.is_integer:
        return _round_to_integer(value, target)
    negative = math.copysign(1, value) < 0
    magnitude = Fraction(abs(value))
    exponent = max(_exponent(magnitude), target.smallest_exponent) if magnitude else target.smallest_exponent
    quantum = Fraction(2) ** (exponent - target.fraction_bits)
    # round() of a Fraction takes ties to the even integer, and the even integer has the even last bit.
    steps = round(magnitude / quantum)
    if steps * quantum > Fraction(target.largest):
        return _beyond(value, target)
    # The leading one of a normal number adds one to the exponent field; a carry does so again.
    pattern = ((exponent - target.smallest_exponent) << target.fraction_bits) + steps
    rounded = -float(steps * quantum) if negative else float(steps * quantum)
    return _rounded(value, rounded, _word(pattern, negative, target))


def value_of(bits: int, format: NumberFormat | str) -> float:
    """The number that a bit pattern stands for: the way back from the `bits` of `round_to`.

    Bits that a format does not use, the 13 lowest of tf32, are ignored. Raises NapkinError for a pattern that is
    negative or has more bits than the format.

    >>> value_of(0b1_01111111_1000000, "bf16"), value_of(0x7F, "fp8-e4m3"), value_of(0b1000, "int4")
    (-1.5, nan, -8.0)
    """
    target = find_format(format) if isinstance(format, str) else format
    _check_word(bits, target)
    if target.is_integer:
        return float(bits - 2**target.bits if bits >> (target.bits - 1) else bits)
    used = 1 + target.exponent_bits + target.fraction_bits
    negative, magnitude = divmod(bits >> (target.bits - used), 2 ** (used - 1))
    exponent, fraction = divmod(magnitude, 2**target.fraction_bits)
    if magnitude > _largest_magnitude(target):
        return math.nan if fraction or not target.has_infinity else -math.inf if negative else math.inf
    leading = 2**target.fraction_bits if exponent else 0
    quantum = Fraction(2) ** (max(exponent - 1, 0) + target.smallest_exponent - target.fraction_bits)
    value = float((leading + fraction) * quantum)
    return -value if negative else value


def neighbour(bits: int, steps: int, format: NumberFormat | str) -> int | None:
    """The bit pattern of the finite number `steps` places above that of another pattern, or below it; None beyond the
    largest and the lowest, and from infinity or NaN.

    >>> value_of(neighbour(round_to(1, "bf16").bits, 1, "bf16"), "bf16")
    1.0078125
    """
    target = find_format(format) if isinstance(format, str) else format
    if not math.isfinite(value := value_of(bits, target)):
        return None
    if target.is_integer:
        moved = int(value) + steps
        return moved % 2**target.bits if target.lowest <= moved <= target.largest else None
    used = 1 + target.exponent_bits + target.fraction_bits
    negative, magnitude = divmod(bits >> (target.bits - used), 2 ** (used - 1))
    # Below zero the patterns run backwards; both zeros are one place.
    place = (-magnitude if negative else magnitude) + steps
    return None if abs(place) > _largest_magnitude(target) else _word(abs(place), place < 0, target)


def _check_word(bits: int, target: NumberFormat) -> None:
    if not 0 <= bits < 2**target.bits:
        raise NapkinError(f"the pattern {bits} is not one of {target.name}: use 0 to {2**target.bits - 1}")


def _largest_magnitude(target: NumberFormat) -> int:
    """The pattern of the largest finite number of a floating-point format, without the sign."""
    used = 1 + target.exponent_bits + target.fraction_bits
    return round_to(target.largest, target).bits >> (target.bits - used)


def bit_fields(bits: int, format: NumberFormat | str) -> str:
    """Write a bit pattern as its fields: sign, exponent, fraction.

    >>> bit_fields(round_to(-1.5, "bf16").bits, "bf16")
    '1 01111111 1000000'
    """
    target = find_format(format) if isinstance(format, str) else format
    digits = f"{bits:0{target.bits}b}"
    if target.is_integer:
        return digits
    fraction_start = 1 + target.exponent_bits
    used = fraction_start + target.fraction_bits
    return f"{digits[0]} {digits[1:fraction_start]} {digits[fraction_start:used]}"


def _exponent(magnitude: Fraction) -> int:
    """The largest e with 2^e <= magnitude, for a magnitude above 0."""
    guess = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return guess if Fraction(2) ** guess <= magnitude else guess - 1


def _word(pattern: int, negative: bool, target: NumberFormat) -> int:
    """The stored word: the sign and the fields below it, shifted to their place."""
    used = 1 + target.exponent_bits + target.fraction_bits
    return (pattern + (negative << (used - 1))) << (target.bits - used)


def _rounded(value: float | int, rounded: float, bits: int, overflow: bool = False) -> Rounded:
    absolute = abs(Fraction(rounded) - Fraction(value))
    relative = absolute / abs(Fraction(value)) if value else Fraction(0)
    return Rounded(bits, rounded, float(absolute), float(relative), rounded == 0 and value != 0, overflow)


def _round_to_integer(value: float | int, target: NumberFormat) -> Rounded:
    nearest = round(Fraction(value))
    if not target.lowest <= nearest <= target.largest:
        return _beyond(value, target)
    return _rounded(value, float(nearest), nearest % 2**target.bits)


def _beyond(value: float | int, target: NumberFormat) -> Rounded:
    """A number beyond the largest finite one: infinity, or else the largest."""
    negative = value < 0
    if not target.has_infinity:
        held = target.lowest if negative else target.largest
        if math.isfinite(value):
            return _rounded(value, held, _largest_bits(negative, target), overflow=True)
        return Rounded(_largest_bits(negative, target), held, math.inf, math.inf, False, True)
    held, infinite_before = -math.inf if negative else math.inf, math.isinf(value)
    error = 0.0 if infinite_before else math.inf
    return Rounded(_word(_top(target), negative, target), held, error, error, False, not infinite_before)


def _largest_bits(negative: bool, target: NumberFormat) -> int:
    if target.is_integer:
        return int(target.lowest if negative else target.largest) % 2**target.bits
    not_numbers = 1 if target.has_nan else 0
    return _word(_top(target) + 2**target.fraction_bits - 1 - not_numbers, negative, target)


def _nan(target: NumberFormat) -> Rounded:
    if not target.has_nan:
        raise NapkinError(f"NaN does not exist in {target.name}: replace it before rounding")
    # The quiet NaN: only the top fraction bit is set, or every bit in formats without infinity.
    fraction = 2 ** (target.fraction_bits - 1) if target.has_infinity else 2**target.fraction_bits - 1
    return Rounded(_word(_top(target) + fraction, False, target), math.nan, math.nan, math.nan, False, False)


def _top(target: NumberFormat) -> int:
    """The pattern in which exactly the exponent bits are set."""
    return (2**target.exponent_bits - 1) << target.fraction_bits
