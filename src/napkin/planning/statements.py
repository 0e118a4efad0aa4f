"""Statements of a text about parameters, FLOPs, bytes, seconds and number formats, each beside what it should be.

Lecture notes, papers and slides state figures that follow from others in the same sentence, or from a datasheet: "a 70B
model in bf16 takes 140 GB", "the H100 does 1,979 TFLOP/s". `check_statements` finds such sentences by patterns,
computes the figure by the rules of `napkin.accounting.rules`, the catalogue of accelerators and the number formats, and
compares. It understands few sentences, and lists those with quantities that it did not understand.
"""

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from napkin.accounting.rules import seconds_rule, training_flops_rule
from napkin.hardware.device import Device
from napkin.hardware.device_file import catalogue
from napkin.model.config import preset, presets
from napkin.number_formats import FORMATS, NumberFormat, find_format
from napkin.planning.rules import parameters_by_rule
from napkin.units import format_bytes, format_count, format_flops, format_rate, format_seconds, format_share

Verdict = Literal["right", "wrong", "not understood"]
Kind = Literal["parameters", "tokens", "flops", "rate", "bytes", "bandwidth", "seconds", "share", "bits", "number"]


@dataclass(frozen=True)
class Statement:
    """A figure that a text states, and the same figure as computed."""

    line: int
    sentence: str
    verdict: Verdict
    stated: str = ""
    computed: str = ""
    by: str = ""
    """How the figure was computed."""


@dataclass(frozen=True)
class Quantity:
    """A number with its unit in a sentence."""

    kind: Kind
    value: float
    half_unit: float
    """Half a unit of the last digit that is stated: what rounding may have changed."""
    start: int
    end: int
    text: str
    binary: float = 1.0
    """How much larger the value is if its prefix is a power of 1,024."""

    def agrees(self, computed: float, *, about: bool) -> bool:
        """True if the computed figure may have been rounded to this one; "about" allows a tenth."""
        room = max(self.half_unit, 0.1 * abs(computed)) if about else self.half_unit
        values = {self.value, self.value * self.binary}
        return any(abs(value - computed) <= room * (value / self.value) + 1e-9 * abs(computed) for value in values)


MOST_SENTENCE = 2000
"""The most characters of a sentence; longer ones are cut."""


def check_statements(text: str) -> list[Statement]:
    """Find the figures that a text states, in Markdown or plain, and compare each with what it should be.

    Statements come in the order of the text. Sentences without quantities are left out; so are blocks of code.
    """
    statements: list[Statement] = []
    for line, raw in _sentences(text):
        sentence = _plain(raw)
        claims = [claim for check in _CHECKS for claim in check(sentence)]
        shown = " ".join(raw.split())
        if claims:
            about = bool(re.search(r"\b(about|around|roughly|approximately|nearly|some|almost)\b|[~≈≃]", sentence))
            statements += [
                Statement(
                    line,
                    shown,
                    "right" if claim.stated.agrees(claim.computed, about=about) else "wrong",
                    claim.stated.text,
                    _FORMATS[claim.stated.kind](claim.computed),
                    claim.by,
                )
                for claim in claims
            ]
        elif any(each.kind not in ("number", "share") for each in _quantities(sentence)):
            statements.append(Statement(line, shown, "not understood"))
    return statements


@dataclass(frozen=True)
class _Claim:
    stated: Quantity
    computed: float
    by: str


_FORMATS: dict[Kind, Callable[[float], str]] = {
    "parameters": format_count,
    "tokens": format_count,
    "flops": lambda value: format_flops(value) if value < 1e21 else f"{value:.3g} FLOP",
    "rate": format_rate,
    "bytes": format_bytes,
    "bandwidth": lambda value: f"{format_bytes(value)}/s",
    "seconds": format_seconds,
    "share": format_share,
    "bits": lambda value: f"{value:g}",
    "number": lambda value: f"{value:.6g}",
}


# Dividing a text into sentences


def _sentences(text: str) -> Iterator[tuple[int, str]]:
    """The sentences with the lines that they begin in; blocks of code are left out."""
    paragraph: list[str] = []
    first, in_code = 1, False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        fence = line.lstrip().startswith(("```", "~~~"))
        begins = bool(re.match(r"\s*([-*+>|#]|\d+[.)])\s", line)) or not line.strip() or fence or in_code
        if begins and paragraph:
            yield from _split(first, paragraph)
            paragraph = []
        in_code ^= fence
        if fence or in_code or not line.strip():
            continue
        first = first if paragraph else number
        paragraph.append(line)


def _split(first: int, lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    whole = "\n".join(lines)
    start = 0
    for end in [*(match.end() for match in re.finditer(r"[.!?][\"')*_]*(?=\s)", whole)), len(whole)]:
        if sentence := whole[start:end].strip():
            before = start + len(whole[start:end]) - len(whole[start:end].lstrip())
            yield first + whole.count("\n", 0, before), sentence[:MOST_SENTENCE]
        start = end


_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")


def _plain(sentence: str) -> str:
    """A sentence without marks of Markdown and TeX, with × for products and ^ for powers."""
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: "^" + match[0].translate(_SUPERSCRIPTS), sentence)
    text = re.sub(r"\\(times|cdot|ast)\b|·|(?<=\d)\s?x(?=\s?\d)", "×", text)
    text = re.sub(r"\\approx\b|\\sim\b", "≈", text).replace("**", " ").replace("\\,", " ")
    text = re.sub(r"\^\{\s*(-?\d+)\s*\}", r"^\1", text)
    text = re.sub(r"\\(text|mathrm|mathbf)\s*\{([^}]*)\}", r"\2", text)
    text = re.sub(r"^\s*(?:[-*+>#|]+|\d+[.)])\s", "", text)
    return re.sub(r"\s+", " ", re.sub(r"[$`_|{}]|\\[a-z]+", " ", text)).strip()


# Quantities.

_DIGITS = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_NUMBER = rf"(?P<digits>{_DIGITS})(?:\s?[×*]\s?10\s?\^\s?(?P<power>-?\d+)|[eE](?P<exponent>[+-]?\d+))?"
_UNIT = (
    r"(?P<share>%)"
    r"|(?P<bytes>[kKMGTPE]i?B|bytes?|(?:kilo|mega|giga|tera|peta)bytes)(?P<per>\s?/\s?s(?:ec)?\b| per second)?\b"
    r"|(?P<flops>(?:(?P<prefix>[kKMGTPEZ])|(?P<long>kilo|mega|giga|tera|peta|exa|zetta))?(?P<flop>FLOPs?|FLOPS|flops?))"
    r"(?P<rate>\s?/\s?s(?:ec)?\b| per second)?"
    r"|(?P<time>milliseconds?|ms|seconds?|minutes?|hours?|days?|weeks?|months?|years?)\b"
    r"|(?P<scale>[KMBT]\b|thousand|million|billion|trillion)?[\s-]*"
    r"(?P<counted>(?:trainable |model )?param(?:eter)?s?|tokens?)\b"
    r"|(?P<bare>[MBT])\b(?!\s?/)"
)
_QUANTITY = re.compile(rf"(?<![\w.,^]){_NUMBER}[\s-]?(?:{_UNIT})")
_SCALES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_PREFIXES = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6, "z": 7}
_SECONDS = {"mi": 60, "ho": 3600, "da": 86400, "we": 7 * 86400, "mo": 30 * 86400, "ye": 365 * 86400, "se": 1}


def _quantities(sentence: str) -> list[Quantity]:
    return [_quantity(match) for match in _QUANTITY.finditer(sentence[:MOST_SENTENCE])]


def _quantity(match: re.Match[str]) -> Quantity:
    number = _number(match["digits"], match["power"] or match["exponent"])
    factor, binary, kind = 1.0, 1.0, "number"
    if match["share"]:
        factor, kind = 0.01, "share"
    elif match["bytes"]:
        name = match["bytes"]
        power = _PREFIXES.get(name[0].lower(), 0) if not name.lower().startswith("byte") else 0
        factor = 1024.0**power if "i" in name[1:2] and name.endswith("B") else 1000.0**power
        binary = 1024.0**power / factor
        kind = "bandwidth" if match["per"] else "bytes"
    elif match["flop"]:
        prefix = (match["prefix"] or match["long"] or " ")[0].lower()
        factor = 1000.0 ** _PREFIXES.get(prefix, 0)
        kind = "rate" if match["rate"] or match["flop"] == "FLOPS" else "flops"
    elif match["time"]:
        factor = 1e-3 if match["time"] == "ms" or match["time"].startswith("milli") else _SECONDS[match["time"][:2]]
        kind = "seconds"
    elif match["counted"]:
        factor = _SCALES[match["scale"]] if match["scale"] else 1.0
        kind = "tokens" if match["counted"].startswith("token") else "parameters"
    elif match["bare"]:
        factor, kind = _SCALES[match["bare"]], "parameters"
    value, half = number
    return Quantity(kind, value * factor, half * factor, match.start(), match.end(), match[0].strip(), binary)  # pyright: ignore[reportArgumentType]


def _number(digits: str, power: str | None) -> tuple[float, float]:
    """A number, and half a unit of its last digit that is not a zero before the point."""
    plain = digits.replace(",", "")
    factor = 10.0 ** max(-400, min(300, int((power or "0")[:5])))
    decimals = len(plain.partition(".")[2])
    zeros = 0 if decimals else len(plain) - len(plain.rstrip("0"))
    return float(plain) * factor, 0.5 * 10.0 ** (zeros - decimals) * factor


def _only(quantities: Sequence[Quantity], kind: Kind) -> Quantity | None:
    """The quantity of a kind, if there is exactly one."""
    of_kind = [each for each in quantities if each.kind == kind]
    return of_kind[0] if len(of_kind) == 1 else None


# Names.


@functools.cache
def _devices() -> tuple[re.Pattern[str], dict[str, Device]]:
    """A pattern of the short names of devices, and the device of each."""
    named: dict[str, Device] = {}
    for device in catalogue():
        for name in (device.name, *device.aliases):
            # A short name would be found in formulas too.
            if len(name) >= 3 and re.search(r"\d", name) and re.search(r"[A-Za-z]", name):
                named.setdefault(name.lower(), device)
    names = sorted(named, key=len, reverse=True)
    pattern = "|".join(re.escape(name) for name in names)
    return re.compile(
        rf"(?<![\w-])(?:(?P<n>\d[\d,]*)\s?[×x*]?\s?)?(?P<name>{pattern})s?(?![\w-])", re.IGNORECASE
    ), named


def _device(sentence: str) -> tuple[Device, int | None] | None:
    """The only device that a sentence names, and how many of it."""
    pattern, named = _devices()
    matches = list(pattern.finditer(sentence))
    devices = {named[match["name"].lower()].name for match in matches}
    if len(devices) != 1:
        return None
    counts = {int(match["n"].replace(",", "")) for match in matches if match["n"]}
    return named[matches[0]["name"].lower()], counts.pop() if len(counts) == 1 else None


_FORMAT_NAMES = (
    r"\b(?:fp64|fp32|tf32|fp16|bf16|fp8|fp4|int8|int4|e4m3|e5m2|float64|float32|float16|bfloat16|float8"
    r"|(?:half|single|double)[ -]precision)\b"
)
_FORMAT = re.compile(_FORMAT_NAMES, re.IGNORECASE)


def _format(sentence: str) -> NumberFormat | None:
    """The only number format that a sentence names."""
    names = {re.split(r"[ -]precision", match[0].lower())[0] for match in _FORMAT.finditer(sentence)}
    formats = {find_format("fp8" if name == "float8" else name).name for name in names}
    return FORMATS[formats.pop()] if len(formats) == 1 else None


@functools.cache
def _preset_names() -> dict[str, str]:
    """Presets by their names without hyphens; GPT-2 alone is said of all four sizes, and of none."""
    return {re.sub(r"[\s_-]", "", name): name for name in presets() if name != "gpt2"}


# The checks


def _training(sentence: str) -> Iterator[_Claim]:
    """FLOPs, or with devices the time, of training so many parameters on so many tokens."""
    quantities = _quantities(sentence)
    parameters, tokens = _only(quantities, "parameters"), _only(quantities, "tokens")
    if parameters is None or tokens is None:
        return
    flops = training_flops_rule(parameters.value, tokens.value)
    formula = "6 · parameters · tokens"
    if stated := _only(quantities, "flops"):
        yield _Claim(stated, flops, formula)
    stated, named, share = _only(quantities, "seconds"), _device(sentence), _mfu(sentence, quantities)
    if stated is None or named is None or share is None:
        return
    device, n = named
    number = _format(sentence)
    name = "bf16" if number is None else number.name.partition("-")[0]
    if n is not None and (peak := next((rate for key, rate in device.peaks.items() if key == name), None)):
        seconds = seconds_rule(flops, n * peak, mfu=share)
        yield _Claim(stated, seconds, f"{formula} / ({n:,} · {format_rate(peak)} dense {name} · MFU {share:.3g})")


def _mfu(sentence: str, quantities: Sequence[Quantity]) -> float | None:
    if (share := _only(quantities, "share")) and re.search(r"\b(MFU|utili[sz]ation)\b", sentence, re.IGNORECASE):
        return share.value if 0 < share.value <= 1 else None
    match = re.search(
        r"\b(?:MFU|utili[sz]ation)\b[^\d]{0,12}(0?\.\d+)|(0?\.\d+)\s(?:MFU|utili[sz]ation)", sentence, re.IGNORECASE
    )
    return float(match[1] or match[2]) if match else None


_OTHER_BYTES = re.compile(r"\b(Adam|optimi[sz]er|gradients?|activations?|cache)", re.IGNORECASE)


def _weights(sentence: str) -> Iterator[_Claim]:
    """Bytes of the weights of a model in a number format."""
    quantities, number = _quantities(sentence), _format(sentence)
    parameters, stated = _only(quantities, "parameters"), _only(quantities, "bytes")
    if parameters and stated and number and not _OTHER_BYTES.search(sentence):
        yield _Claim(stated, parameters.value * number.bytes, f"parameters · {number.bytes:g} bytes of {number.name}")


_OF_A_PROGRAM = re.compile(
    r"\b(reach|achiev|measur|attain|sustain|MFU|use[sd]?\b|using|need|tak(e|ing)|took|occup|reserv|free\b|fit)",
    re.IGNORECASE,
)
_OTHER_MEMORY = re.compile(
    r"\b(NVLink|PCIe|InfiniBand|network|L1|L2|cache|SRAM|shared|per SM|registers?)\b", re.IGNORECASE
)


def _datasheet(sentence: str) -> Iterator[_Claim]:
    """Peak, memory and bandwidth of a device: what it has, not what a program reaches or takes of it."""
    named, quantities = _device(sentence), _quantities(sentence)
    if named is None or named[1] not in (None, 1) or _OF_A_PROGRAM.search(sentence):
        return
    if any(each.kind in ("parameters", "tokens") for each in quantities):
        return
    device = named[0]
    # "TFLOPs" is often said of a rate.
    stated = _only(quantities, "rate") or _only(quantities, "flops")
    if stated and stated.value > 1e11:
        yield from _peak(replace(stated, kind="rate"), device, _format(sentence), sentence)
    if _OTHER_MEMORY.search(sentence):
        return
    if (stated := _only(quantities, "bandwidth")) and re.search(r"\b(memory|HBM\w*|bandwidth)\b", sentence):
        yield _Claim(stated, device.memory_bandwidth, f"memory bandwidth, {device.name}")
    if (stated := _only(quantities, "bytes")) and re.search(r"\b(memory|HBM\w*|V?RAM)\b", sentence):
        yield _Claim(stated, float(device.advertised_bytes), f"memory as advertised, {device.name}")


def _peak(stated: Quantity, device: Device, number: NumberFormat | None, sentence: str) -> Iterator[_Claim]:
    """The peak in a number format, or where none is named the nearest one."""
    sparse = re.search(r"\bspars", sentence, re.IGNORECASE) is not None
    rates = dict(device.sparse if sparse else device.peaks)
    if number is not None:
        name = number.name.partition("-")[0]
        rates = {key: rate for key, rate in rates.items() if key == name}
    if not rates:
        return
    key, nearest = min(rates.items(), key=lambda item: abs(math.log(item[1] / stated.value)))
    by = f"{key} {'sparse' if sparse else 'dense'}, {device.name}"
    if not sparse and key in device.sparse and stated.agrees(device.sparse[key], about=False):
        by += " (the stated one is that of 2:4 sparsity)"
    yield _Claim(stated, nearest, by)


def _published(sentence: str) -> Iterator[_Claim]:
    """Parameters of a published model."""
    stated = [each for each in _quantities(sentence) if each.kind == "parameters"]
    squeezed = re.sub(r"[\s_-]", "", sentence.lower())
    names = [name for name in _preset_names() if re.search(rf"(?<![\w.]){re.escape(name)}(?![\d.]*[\db])", squeezed)]
    longest = max(names, key=len, default="")
    if longest and all(name in longest for name in names) and re.search(r"\bparam", sentence):
        counted = [each for each in stated if "param" in each.text]
        if len(counted) == 1:
            name = _preset_names()[longest]
            yield _Claim(counted[0], float(parameters_by_rule(preset(name))), f"parameters of the preset {name}")


_BITS = re.compile(
    r"\b(?P<digits>\d+)[ -]?(?:bits? (?:for|of) (?:the )?)?(?P<field>exponent|mantissa|fraction)(?: bits?)?\b"
)
_LARGEST = re.compile(rf"\b(?:largest|maximum|max|biggest)\b[^\d]{{0,60}}{_NUMBER}", re.IGNORECASE)
_SMALLEST = re.compile(rf"\b(?:smallest|minimum)\b[^\d]{{0,20}}(?P<normal>normal)[^\d]{{0,40}}{_NUMBER}", re.IGNORECASE)
_WIDTH = re.compile(
    rf"{_FORMAT_NAMES}[^.,;\d]{{0,20}}\b(?:is|takes?|uses?|needs?|has|occupies) (?P<digits>{_DIGITS}) "
    r"(?P<unit>bytes?|bits?)\b(?! (?:for|of) (?:the )?(?:exp|man|frac))",
    re.IGNORECASE,
)


def _number_format(sentence: str) -> Iterator[_Claim]:
    """Fields, range and width of a number format."""
    number = _format(sentence)
    if number is None or number.is_integer:
        return
    for match in _BITS.finditer(sentence):
        bits = number.exponent_bits if match["field"] == "exponent" else number.fraction_bits
        yield _Claim(_figure("bits", match), bits, f"{match['field']} bits of {number.name}")
    # Names of formats have digits too.
    rest = _FORMAT.sub("it", sentence)
    if match := _LARGEST.search(rest):
        yield _Claim(_figure("number", match), number.largest, f"largest number of {number.name}")
    if match := _SMALLEST.search(rest):
        yield _Claim(_figure("number", match), number.smallest_normal, f"smallest normal number of {number.name}")
    is_of_more = any(each.kind in ("parameters", "flops") for each in _quantities(sentence))
    if (match := _WIDTH.search(sentence)) and not is_of_more and not _BITS.search(sentence):
        width = number.bits if match["unit"].lower().startswith("bit") else number.bytes
        yield _Claim(_figure("bits", match), width, f"{match['unit']} of a number in {number.name}")


def _figure(kind: Kind, match: re.Match[str]) -> Quantity:
    groups = match.groupdict()
    power = groups.get("power") or groups.get("exponent")
    value, half = _number(groups["digits"], power)
    half = half if power or "." in groups["digits"] else 0.5
    text = f"{groups['digits']}{f'e{power}' if power else ''}"
    return Quantity(kind, value, half, match.start(), match.end(), text)


_SIDE = r"[\d.,()+\-*/×÷^ ]|(?<=\d)[eE][+-]?(?=\d)|(?<=\d)[KMBT](?![A-Za-z])|%"
_EQUATION = re.compile(
    rf"(?P<left>(?:{_SIDE}){{3,200}}?)\s*(?:=|≈|≃)\s*(?P<right>{_NUMBER})\s?(?P<suffix>[KMBT%]?)(?![\w.,]*[\d×*/^+(])"
)


def _arithmetic(sentence: str) -> Iterator[_Claim]:
    """Products, quotients and sums of numbers, with what they are said to be."""
    for match in _EQUATION.finditer(sentence):
        left = match["left"].lstrip(" ,.)").rstrip()
        if not re.search(r"\d\s*[×*/÷^+-]\s*\(?\d", left):
            continue
        computed = _value(left)
        if computed is None or not math.isfinite(computed) or computed == 0:
            continue
        value, half = _number(match["digits"], match["power"] or match["exponent"])
        scale = 0.01 if match["suffix"] == "%" else _SCALES.get(match["suffix"], 1.0)
        text = match["right"].strip() + match["suffix"]
        yield _Claim(Quantity("number", value * scale, half * scale, match.start(), match.end(), text), computed, left)


_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def _value(expression: str) -> float | None:
    """The value of an expression of numbers; None for what is none, or too large."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", expression).replace("×", "*").replace("÷", "/").replace("^", "**")
    text = re.sub(r"(?<=\d)([KMBT])\b", lambda match: f"*{_SCALES[match[1]]:.0f}", text)
    text = re.sub(r"(\d+(?:\.\d+)?)\s?%", r"(\1/100)", text)
    try:
        return _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _evaluated(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
        if isinstance(result, complex):
            raise ValueError("not a real number")
        return result
    raise ValueError("not arithmetic")


_CHECKS: tuple[Callable[[str], Iterator[_Claim]], ...] = (
    _training,
    _weights,
    _datasheet,
    _published,
    _number_format,
    _arithmetic,
)
