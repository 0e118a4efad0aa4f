"""The result of a measurement of bits per byte, as a file, and the comparison of two of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from napkin.errors import NapkinError
from napkin.evaluation.text_windows import SampledBits
from napkin.runs.json_file import read_json

FORMAT = "napkin-bits-per-byte"
VERSION = 1


@dataclass(frozen=True)
class BitsResult:
    """What is written as JSON."""

    format: str
    version: int
    text: dict[str, Any]
    """Where it came from, and the SHA-256 of its documents."""
    model: dict[str, Any]
    made_with: dict[str, str]
    bits: SampledBits


@dataclass(frozen=True)
class BitsDifference:
    """Bits per byte of the first less those of the second; the samples are independent."""

    difference: float
    standard_error: float
    p_value: float
    """Two-sided, of a normal distribution."""


def bits_result(
    bits: SampledBits, text: Mapping[str, Any], model: Mapping[str, Any], made_with: Mapping[str, str]
) -> BitsResult:
    """The result with what it is of."""
    return BitsResult(FORMAT, VERSION, dict(text), dict(model), dict(made_with), bits)


def read_bits_result(path: Path) -> BitsResult | None:
    """Read a result; None where the file is another kind of result. Raises NapkinError where there is none."""
    values = read_json(path, dict)
    if values is None:
        raise NapkinError(f"there is no result '{path}': write one with `napkin evaluate RUN --text FILE`")
    return read_json(path, BitsResult) if values.get("format") == FORMAT else None


def compare_bits(first: BitsResult, second: BitsResult) -> BitsDifference:
    """How two models differ on one text, whatever their tokenizers.

    Raises NapkinError for results of different texts. A tokenizer that changes the text has other documents.
    """
    if first.text.get("sha256") != second.text.get("sha256"):
        raise NapkinError(
            f"the results are of different texts ({_text(first)}; {_text(second)}), or a tokenizer changes the text: "
            "measure both on one --text"
        )
    difference = first.bits.bits_per_byte - second.bits.bits_per_byte
    error = math.hypot(first.bits.standard_error, second.bits.standard_error)
    if error:
        from scipy import stats

        p_value = float(2 * stats.norm.sf(abs(difference) / error))
    else:
        p_value = float(difference == 0)
    return BitsDifference(difference, error, p_value)


def _text(result: BitsResult) -> str:
    return f"{result.text.get('name')} {str(result.text.get('sha256'))[:8]}"
