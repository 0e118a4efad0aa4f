"""Parsing and formatting quantities: "70B", "80GiB", "1024xH100".

Decimal and binary prefixes are distinct: 1 GB is 10^9 bytes, 1 GiB is 2^30 bytes. Printed numbers have three
significant digits and one unit.
"""

import math
import re
from decimal import Decimal

from napkin.errors import NapkinError

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12, "P": 10**15}
_BYTES = {
    **{unit + "B": 1000**power for power, unit in enumerate(["", "k", "M", "G", "T", "P"])},
    **{unit + "iB": 1024**power for power, unit in enumerate(["", "K", "M", "G", "T", "P"]) if power},
    "KB": 1000,
}
_NUMBER = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d{1,2})?)\s*([A-Za-z]*)\s*", re.ASCII)
_SECONDS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
    **dict.fromkeys(("w", "week", "weeks"), 7 * 86_400),
    **dict.fromkeys(("month", "months"), 30 * 86_400),
    **dict.fromkeys(("y", "year", "years"), 365 * 86_400),
}
# Decimal keeps 28 digits; larger values would be rounded.
_LARGEST = 10**27


def parse_count(text: str) -> int:
    """Parse a count, such as of parameters, tokens or steps.

    >>> parse_count("70B"), parse_count("1.5T"), parse_count("4096"), parse_count("6.3e24")
    (70000000000, 1500000000000, 4096, 6300000000000000000000000)

    Raises NapkinError for anything else, including fractions.
    """
    return _parse(text, _DECIMAL, "a count such as 4096, 124M, 70B or 1.5T")


def parse_bytes(text: str) -> int:
    """Parse a number of bytes; a number without a unit is in bytes.

    >>> parse_bytes("80GB"), parse_bytes("80GiB"), parse_bytes("512")
    (80000000000, 85899345920, 512)
    """
    return _parse(text, {**_BYTES, "": 1}, "a number of bytes such as 512, 80GB or 80GiB")


def parse_seconds(text: str) -> int:
    """Parse a duration, which must have a unit; a month has 30 days, a year 365.

    >>> parse_seconds("1week"), parse_seconds("10 days"), parse_seconds("1.5h")
    (604800, 864000, 5400)
    """
    return _parse(text, _SECONDS, "a duration such as 36h, 10days, 1week or 3months")


def parse_dollars(text: str) -> int:
    """Parse a sum of money in US dollars.

    >>> parse_dollars("50000usd"), parse_dollars("$1.5M"), parse_dollars("20k")
    (50000, 1500000, 20000)
    """
    plain = re.sub(r"^\s*\$|\s*(usd|dollars?)\s*$", "", text, flags=re.IGNORECASE)
    try:
        return parse_count(plain)
    except NapkinError:
        raise NapkinError(f"{text!r} is not a sum of US dollars such as 50000usd, 20k or $1.5M") from None


def parse_devices(text: str) -> tuple[int, str]:
    """Parse a number of devices and their name; the number defaults to 1.

    >>> parse_devices("1024xH100"), parse_devices("A100-80GB")
    ((1024, 'H100'), (1, 'A100-80GB'))
    """
    match = re.fullmatch(r"\s*(?:([0-9]{1,12})\s*[x×]\s*)?(\S.*?)\s*", text)
    if not match or (match[1] and not int(match[1])):
        raise NapkinError(f"{text!r} is not a number of devices: use for example H100 or 8xH100")
    return int(match[1] or 1), match[2]


def format_count(value: float) -> str:
    """Format a count with three significant digits.

    >>> format_count(124439808), format_count(512), format_count(6.3e24)
    ('124 M', '512', '6.30e+24')
    """
    return _scaled(value, ["", "k", "M", "B", "T"], 1000)


def format_flops(value: float) -> str:
    """Format a number of FLOPs (not a rate).

    >>> format_flops(2.916e11)
    '292 GFLOP'
    """
    return _scaled(value, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"], 1000)


def format_rate(flops_per_second: float) -> str:
    """Format a rate in FLOP/s.

    >>> format_rate(989.5e12)
    '990 TFLOP/s'
    """
    return format_flops(flops_per_second) + "/s"


def format_bytes(value: float) -> str:
    """Format a number of bytes in decimal units.

    >>> format_bytes(2.722e9), format_bytes(512)
    ('2.72 GB', '512 B')
    """
    return _scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"], 1000)


def format_gibibytes(value: float) -> str:
    """Format a number of bytes in binary units.

    >>> format_gibibytes(32 * 2**30)
    '32.0 GiB'
    """
    return _scaled(value, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024)


def format_seconds(value: float) -> str:
    """Format a duration.

    >>> format_seconds(0.0123), format_seconds(151), format_seconds(12435264)
    ('12.3 ms', '2 min 31 s', '143.9 days')
    """
    if value < 0 or not math.isfinite(value):
        return "unknown"
    # Compared as printed: 59.96 s is "1 min 00 s", never "60.0 s".
    if value < 59.95:
        return _scaled(value * 1e9, ["ns", "µs", "ms", "s"], 1000)
    if round(value) < 3600:
        minutes, seconds = divmod(round(value), 60)
        return f"{minutes} min {seconds:02d} s"
    if round(value / 60) < 48 * 60:
        hours, minutes = divmod(round(value / 60), 60)
        return f"{hours} h {minutes:02d} min"
    return f"{value / 86400:.1f} days"


def format_share(share: float) -> str:
    """Print a share of 1 as a percentage.

    >>> format_share(0.4123), format_share(1), format_share(0.0123)
    ('41.2%', '100%', '1.23%')
    """
    return format_three_digits(100 * share) + "%"


def format_three_digits(value: float) -> str:
    """Print a bare number with three significant digits, zeros among them.

    >>> format_three_digits(2.4), format_three_digits(186.35), format_three_digits(12345.6)
    ('2.40', '186', '12346')
    """
    if value == 0 or 999.5 <= abs(value) < 1e6:
        return f"{value:.0f}"
    # "#" keeps the zeros that are among the three digits, and a point that may then be the last character.
    return f"{value:#.3g}".removesuffix(".")


def _parse(text: str, factors: dict[str, int], expected: str) -> int:
    match = _NUMBER.fullmatch(text)
    if not match or match[2] not in factors:
        raise NapkinError(f"{text!r} is not {expected}")
    # Decimal keeps "1.1T" and integers above 2^53 exact, where a float would round.
    value = Decimal(match[1].replace("_", "")) * factors[match[2]]
    if value > _LARGEST:
        raise NapkinError(f"{text!r} is too large: use at most {_LARGEST:.0e}")
    if not match[2] and value != round(value):
        raise NapkinError(f"{text!r} is not a whole number: round it")
    return round(value)


def _scaled(value: float, units: list[str], base: int) -> str:
    if not math.isfinite(value):
        return "unknown"
    magnitude, power = abs(value), 0
    # 999.5 prints as 1.00 of the next unit, never as "1000".
    while magnitude >= base - (0.5 if magnitude >= 999.5 else 0) and power < len(units) - 1:
        magnitude, power = magnitude / base, power + 1
    sign = "-" if value < 0 else ""
    if magnitude >= 9999.5 or 0 < magnitude < 1e-3:
        return f"{value:.2e} {units[0]}".rstrip()
    if magnitude >= 999.5 or (magnitude == int(magnitude) and power == 0):
        number = f"{magnitude:.0f}"
    else:
        # "#" keeps trailing zeros among the three digits, and a decimal point that may then be the last character.
        number = f"{magnitude:#.3g}".removesuffix(".")
    return f"{sign}{number} {units[power]}".rstrip()
