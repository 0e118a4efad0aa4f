"""Number formats bit by bit: a number rounded to each, the bits of one, and the numbers beside it."""

import math
from typing import Annotated, Any

import msgspec

from napkin.errors import NapkinError
from napkin.number_formats import FORMATS, NumberFormat, find_format, neighbour, round_to, value_of
from napkin.studio.learn.idea import Idea

BESIDE = 6
"""Numbers of the format that are shown on each side."""


class NumberRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A number as it is typed, or the bits of one."""

    value: Annotated[str, msgspec.Meta(max_length=60)] = "0.1"
    format: str = "bf16"
    bits: Annotated[str, msgspec.Meta(pattern="^[01]{0,64}$")] = ""
    """The bits, the sign first; they decide where they are given."""


def number_answer(asked: NumberRequest) -> dict[str, Any]:
    """The number in the chosen format, with its bits and neighbours, and in every format.

    Raises NapkinError for a text that is not a number, and for bits of another length than the format's.
    """
    chosen = find_format(asked.format)
    if asked.bits:
        if len(asked.bits) != chosen.bits:
            raise NapkinError(f"{len(asked.bits)} bits are given, and {chosen.name} has {chosen.bits}: give all")
        word = int(asked.bits, 2)
        given = value_of(word, chosen)
    else:
        given = _number(asked.value)
        word = round_to(given, chosen).bits
    value = value_of(word, chosen)
    return {
        "format": chosen.name,
        "given": _shown(given),
        "value": _shown(value),
        "fields": _fields(word, chosen),
        "below": _gap(word, -1, chosen),
        "above": _gap(word, 1, chosen),
        "beside": _beside(word, chosen),
        "formats": [_row(each, given) for each in FORMATS.values()],
    }


def _number(text: str) -> float:
    try:
        return float(text.strip().replace("_", ""))
    except ValueError:
        raise NapkinError(f"'{text}' is not a number: type one as 0.1, -3e-5, inf or nan") from None


def _shown(value: float) -> dict[str, Any]:
    """A number for the page: JSON has no infinity and no NaN, which are text alone."""
    return {"number": value if math.isfinite(value) else None, "text": repr(value)}


def _fields(word: int, kind: NumberFormat) -> list[dict[str, str]]:
    """Each bit with the field that it is in."""
    widths = {"sign": kind.sign_bits, "exponent": kind.exponent_bits, "fraction": kind.fraction_bits}
    names = [name for name, width in widths.items() for _ in range(width)]
    names += ["unused"] * (kind.bits - len(names))
    return [{"bit": bit, "field": name} for bit, name in zip(f"{word:0{kind.bits}b}", names, strict=True)]


def _gap(word: int, steps: int, kind: NumberFormat) -> float | None:
    """The distance to the next number of the format; None where there is none."""
    near = neighbour(word, steps, kind)
    return None if near is None else abs(value_of(near, kind) - value_of(word, kind))


def _beside(word: int, kind: NumberFormat) -> list[float]:
    """The finite numbers around that of the word, the smallest first."""
    near = [neighbour(word, steps, kind) for steps in range(-BESIDE, BESIDE + 1)]
    values = [value_of(each, kind) for each in near if each is not None]
    return sorted({each for each in values if math.isfinite(each)})


def _row(kind: NumberFormat, given: float) -> dict[str, Any]:
    """A format's range, and the number rounded to it."""
    row: dict[str, Any] = {
        "name": kind.name,
        "bits": kind.bits,
        "largest": kind.largest,
        "smallest_normal": kind.smallest_normal,
        "smallest": kind.smallest_subnormal,
        "resolution": kind.resolution,
    }
    try:
        rounded = round_to(given, kind)
    except NapkinError:
        return {**row, "value": "no NaN", "relative_error": None, "note": ""}
    note = "overflow" if rounded.overflow else "underflow" if rounded.underflow else ""
    error = rounded.relative_error if math.isfinite(rounded.relative_error) else None
    return {**row, "value": repr(rounded.value), "relative_error": error, "note": note}


NUMBERS = Idea(
    name="number-formats",
    title="Number formats, bit by bit",
    summary="Type a number or toggle bits: the value, the gap to the next number, and the range of each format.",
    text=(
        "A floating-point number is a sign, an exponent and a fraction. The exponent chooses a power of two; the "
        "fraction divides the way to the next power into equal steps. More exponent bits reach further, more fraction "
        "bits step finer, and 16 bits must choose: bf16 has the range of fp32 with steps of 1/128, fp16 has steps of "
        "1/1024 and ends at 65,504.",
        "A number between two neighbours is rounded to the nearer one. The gap grows with the number, so an update "
        "that is smaller than half a gap is lost: that is why weights are kept in fp32 while products run in bf16.",
    ),
    formula="value = (−1)^sign · 1.fraction · 2^(exponent − bias), bias = 2^(e − 1) − 1\n"
    "gap above a normal number = 2^(exponent − bias − fraction bits)",
    command="napkin formats 0.1",
    files=("number_formats.py", "recipe/precision.py"),
    request=NumberRequest,
    answer=number_answer,
)
