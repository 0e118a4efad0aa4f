import doctest
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin import units
from napkin.errors import NapkinError
from napkin.units import (
    format_bytes,
    format_count,
    format_flops,
    format_gibibytes,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_devices,
    parse_seconds,
)

FORMATS = (format_count, format_flops, format_rate, format_bytes, format_gibibytes, format_seconds)
SCALES = {
    format_count: ("", ["", "k", "M", "B", "T"], 1000),
    format_flops: ("FLOP", ["", "k", "M", "G", "T", "P", "E", "Z"], 1000),
    format_bytes: ("B", ["", "k", "M", "G", "T", "P"], 1000),
    format_gibibytes: ("B", ["", "Ki", "Mi", "Gi", "Ti", "Pi"], 1024),
}


def test_the_examples_in_the_docstrings_are_true() -> None:
    assert doctest.testmod(units).failed == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4_096", 4096),
        (" 70 B ", 70 * 10**9),
        ("124M", 124 * 10**6),
        ("1.1T", 1_100_000_000_000),
        ("9007199254740993", 2**53 + 1),
        ("6.3e24", 63 * 10**23),
        ("1e3k", 10**6),
        ("32K", 32_000),
    ],
)
def test_counts_are_read_exactly(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("512", 512),
        ("1GB", 10**9),
        ("1GiB", 2**30),
        ("80 GiB", 80 * 2**30),
        ("1.5KiB", 1536),
        ("1kB", 1000),
        ("1KB", 1000),
        ("80.1GiB", round(801 * 2**30 / 10)),
    ],
)
def test_decimal_and_binary_bytes_are_not_confused(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    "text", ["", " ", "-5", "+5", "five", "5 X", "0x10", "1.5", "1e-3", "1e999", "1e99", "9" * 40, "nan", "1,000", "٣"]
)
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(NapkinError, match=re.escape(repr(text))):
        parse_count(text)


@pytest.mark.parametrize("text", ["5 gb", "5GiBs", "5Gb", "5B/s", "-5GB", "GB"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(NapkinError, match=r"number.*bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("H100", (1, "H100")),
        ("8xH100", (8, "H100")),
        ("8 × A100-80GB", (8, "A100-80GB")),
        ("x86", (1, "x86")),
        ("1024x RTX 4090 ", (1024, "RTX 4090")),
    ],
)
def test_devices_are_a_number_and_a_name(text: str, devices: tuple[int, str]) -> None:
    assert parse_devices(text) == devices


@pytest.mark.parametrize("text", ["", " ", "0xH100", "00xH100"])
def test_no_devices_are_refused(text: str) -> None:
    with pytest.raises(NapkinError, match=r"number.*devices"):
        parse_devices(text)


@given(st.integers(0, 10**15))
def test_a_printed_count_reads_back_to_three_digits(value: int) -> None:
    assert parse_count(format_count(value)) == pytest.approx(value, rel=0.0051)


@pytest.mark.parametrize("show", SCALES)
@given(value=st.floats(1e-3, 9e14))
def test_figures_have_three_digits_and_are_right_to_half_the_last(show: Any, value: float) -> None:
    unit, prefixes, base = SCALES[show]
    number, _, shown_unit = show(value).partition(" ")
    power = prefixes.index(shown_unit.removesuffix(unit))
    digits = re.sub(r"^0\.0*|\D", "", number)
    # Of 1,023 KiB all four are shown: the next unit begins at 1,024.
    assert len(digits) <= 3 or (base == 1024 and len(digits) == 4)
    assert float(number) * base**power == pytest.approx(value, rel=0.0051)


@given(st.floats(1e-8, 59))
def test_short_times_keep_three_digits(seconds: float) -> None:
    number, _, unit = format_seconds(seconds).partition(" ")
    assert float(number) * {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1}[unit] == pytest.approx(seconds, rel=0.0051)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 ns"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (86400, "24 h 00 min"),
        (172_769, "47 h 59 min"),
        (172_799, "2.0 days"),
    ],
)
def test_times_carry_over_to_the_next_unit(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (999, "999"), (999.4, "999"), (999.5, "1.00 k"), (9.996, "10.0"), (99.96, "100"), (0.012, "0.0120")],
)
def test_rounding_never_shows_a_fourth_digit(value: float, shown: str) -> None:
    assert format_count(value) == shown


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_unknown(value: float) -> None:
    assert {show(value).removesuffix("/s") for show in FORMATS} == {"unknown"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("90min", 5400),
        ("36h", 129_600),
        ("10days", 864_000),
        ("1 day", 86_400),
        ("1week", 604_800),
        ("0.5 weeks", 302_400),
        ("1month", 2_592_000),
        ("2years", 63_072_000),
    ],
)
def test_a_duration_has_a_unit(text: str, seconds: int) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "week", "10", "1 fortnight", "-1day", "1e99days", "inf days", "1M"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(NapkinError, match=r"36h, 10days, 1week.*3months$|too large"):
        parse_seconds(text)
