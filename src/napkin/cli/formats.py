"""`napkin formats`."""

import math
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from napkin.cli.options import JsonOption, parse
from napkin.cli.terminal import print_json, print_table
from napkin.errors import NapkinError
from napkin.number_formats import FORMATS, NumberFormat, Rounded, bit_fields, round_to


@dataclass(frozen=True)
class FormatsOptions(JsonOption):
    """Print the number formats; or VALUE rounded to each of them (write `-- -1.5` for a negative one)."""

    value: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="VALUE")] = None
    """A number to round to each format, for example 1e-8."""


def main(arguments: list[str]) -> None:
    """Print bits, range and resolution of every format, or a value in every format."""
    options = parse(FormatsOptions, "formats", arguments)
    if options.value is None:
        _print_formats(options.json)
    else:
        _print_value(_number(options.value), options.json)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise NapkinError(
            f"'{text}' is not a number: give one, as in `napkin formats 1e-8`, or none for the table of all formats"
        ) from None


def _print_formats(as_json: bool) -> None:
    if as_json:
        print_json({name: _describe(number) for name, number in FORMATS.items()})
        return
    headings = ("format", "bits", "s+e+f", "largest", "normal from", "subnormal from", "resolution")
    rows = []
    for name, number in FORMATS.items():
        fields = f"{number.sign_bits}+{number.exponent_bits}+{number.fraction_bits}"
        figures = (number.largest, number.smallest_normal, number.smallest_subnormal, number.resolution)
        rows.append((name, str(number.bits), fields, *(f"{figure:.5g}" for figure in figures)))
    print_table(headings, rows)


def _print_value(value: float, as_json: bool) -> None:
    formats = {name: number for name, number in FORMATS.items() if number.has_nan or not math.isnan(value)}
    rounded = {name: round_to(value, number) for name, number in formats.items()}
    if as_json:
        print_json({name: asdict(each) for name, each in rounded.items()})
        return
    rows = [
        (name, f"{each.value:.9g}", f"{each.relative_error:.3g}", _verdict(each), bit_fields(each.bits, name))
        for name, each in rounded.items()
    ]
    print_table(("format", "value", "relative error", "", "sign exponent fraction"), rows, align="lrrll")


def _verdict(rounded: Rounded) -> str:
    return "underflow" if rounded.underflow else "overflow" if rounded.overflow else ""


def _describe(number: NumberFormat) -> dict[str, float | int]:
    return {
        "bits": number.bits,
        "bytes": number.bytes,
        "sign_bits": number.sign_bits,
        "exponent_bits": number.exponent_bits,
        "fraction_bits": number.fraction_bits,
        "largest": number.largest,
        "smallest_normal": number.smallest_normal,
        "smallest_subnormal": number.smallest_subnormal,
        "resolution": number.resolution,
    }
