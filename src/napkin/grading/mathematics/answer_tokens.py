"""An answer's text, LaTeX or plain, as tokens.

Only known tokens pass: an answer with a character or command that is not listed is not understood. Digits are ASCII
digits; letters of other alphabets are not taken for look-alikes.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from napkin.grading.mathematics.expression import REALS, NotUnderstood

MOST_CHARACTERS = 2000
"""The longest answer that is read; the longest of the published problem sets have some 200."""
MOST_TOKENS = 400
MOST_DIGITS = 1000
"""The most digits of a number as it is written."""
MOST_REPEATING = 100
"""The most characters of a number whose decimals repeat."""

TokenKind = Literal["number", "name", "function", "command", "mark", "words"]


@dataclass(frozen=True)
class Token:
    """A number, a variable, a function's name, a command of LaTeX that takes arguments, a mark, or words."""

    kind: TokenKind
    text: str
    upright: bool = field(default=False, compare=False)
    """True for a name in \\text or \\mathrm, as units are."""


FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt".split()
)  # fmt: skip
_OTHER_NAMES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
_COMMANDS = frozenset({"frac", "sqrt", "binom", "overline", "begin", "end"})
_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon"
    " phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega".split()
)
_CHARACTERS = {
    "−": "-", "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "∕": "/", "⁄": "/", "≤": "≤", "≥": "≥", "≠": "≠",
    "±": "±", "∈": "∈", "°": "°", "√": "√", "∪": "∪", "€": "\x01€\x02", "¢": "\x01¢\x02",
    "∅": " \\varnothing ", "ℝ": " \\mathbb{R} ",
    **dict.fromkeys("\u00a0\u2009\u202f", " "),
    **{sign: f" \\{name} " for sign, name in zip("π∞θαβλ", "pi infty theta alpha beta lambda".split(), strict=True)},
    **{sign: f"\\frac{{{n}}}{{{d}}}" for sign, n, d in zip("½⅓⅔¼¾⅕", "112131", "233445", strict=True)},
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_MARKS = {
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥",
    "geqslant": "≥", "lt": "<", "gt": ">", "ne": "≠", "neq": "≠", "pm": "±", "cup": "∪", "in": "∈", "circ": "°",
    "degree": "°", "langle": "⟨", "rangle": "⟩", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "lfloor": "⌊",
    "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉", "lbrace": "\\{", "rbrace": "\\}", "lbrack": "[", "rbrack": "]",
    "to": "→", "land": "and", "lor": "or",
}  # fmt: skip
_REPEATING = re.compile(
    r"(?<![0-9.])(?P<whole>[0-9]*)\.(?P<once>[0-9]*)(?:\\(?:overline|bar)\s*(?:\{\s*(?P<group>[0-9]+)\s*\}|(?P<digit>[0-9]))"
    r"|\\dot\s*\{?(?P<first>[0-9])\}?(?:(?P<middle>[0-9]*)\\dot\s*\{?(?P<last>[0-9])\}?)?)(?![0-9])"
)
_REPEATING_OR_PRODUCT = re.compile(r"[0-9]*\.[0-9]*\([0-9]+\)")
_REALS = re.compile(r"\\(?:mathbb|mathbf|Bbb)\s*\{?\s*R\s*\}?|\\R(?:eals)?(?![a-zA-Z])")
_ROW_SPACING = re.compile(r"\\\\\s*\[\s*-?[0-9.]+\s*(?:pt|ex|em|mm|cm|in)\s*\]")
_WORDS_IN = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|operatorname\*?|rm)\s*\{([^{}]*)\}"
)
_LEFT_OUT = re.compile(
    r"\\(?:left|right)\s*\."
    r"|\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|quad|qquad)(?![a-zA-Z])|(?<!\\)\\[,;:! ]|~"
)
# 1{,}000, 1\,000, 1,\!000 and 1 000 are 1000.
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\[,;: ]| )(?=[0-9]{3}(?![0-9]))")
_TOKEN = re.compile(
    r"(?P<grouped>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?)"
    r"|(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|\\(?P<command>[a-zA-Z]+)|(?P<escaped>\\[{}|%$])|(?P<row>\\\\)"
    r"|(?P<letters>[a-zA-Z]+)|\x01(?P<words>[^\x02]*)\x02"
    r"|(?P<power>\*\*)|(?P<relation><=|>=|!=|==)|(?P<mark>[-+*/^_!|,;:=<>()\[\]{}%&≤≥≠±∈∪°√⟨⟩⌊⌋⌈⌉])|(?P<reals>ℝ)|\s+"
)
UNIT_SYMBOLS = frozenset(("mm", "mi", "min"))
"""Units that would be read as variables side by side."""
_RELATIONS = {"<=": "≤", ">=": "≥", "!=": "≠", "==": "="}


def tokens_of(text: str) -> list[Token]:
    """The tokens of an answer without its unit. Raises NotUnderstood."""
    text = prepared(text)
    tokens: list[Token] = []
    position, depth = 0, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotUnderstood(f"the character {text[position]!r} is not known")
        if match["grouped"] and depth:
            # In brackets a comma divides items: {100,200}.
            match = re.compile(r"(?P<number>[0-9]+)").match(text, position)
            assert match is not None
        tokens += _tokens_of(match.lastgroup, match[0], match)
        depth += match[0] in ("(", "[", "\\{", "⟨")
        depth -= match[0] in (")", "]", "\\}", "⟩")
        position = match.end()
        if len(tokens) > MOST_TOKENS:
            raise NotUnderstood("it is too long")
    return tokens


def prepared(text: str) -> str:
    """The text with spacing commands left out and known characters written in ASCII; words stand between \\x01 and
    \\x02."""
    if len(text) > MOST_CHARACTERS:
        raise NotUnderstood("it is too long")
    if "\x01" in text or "\x02" in text:
        raise NotUnderstood("it has control characters")
    text = _REPEATING.sub(_as_fraction, _THOUSANDS.sub("", text))
    if _REPEATING_OR_PRODUCT.search(text):
        # 0.1(6) is 1/6 in some countries.
        raise NotUnderstood("a decimal before digits in brackets is not clear")
    text = re.sub(r"(?<=[0-9])\s*[xX]\s*(?=10\s*(?:\^|\*\*))", "*", _ROW_SPACING.sub(r"\\\\", text))
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    text = "".join(_CHARACTERS.get(character, character) for character in text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\[dt]binom(?![a-zA-Z])", r"\\binom", text)
    text = _REALS.sub(f" {REALS} ", text)
    text = _WORDS_IN.sub("\x01\\1\x02", text)
    return _LEFT_OUT.sub(" ", text)


def _as_fraction(match: re.Match[str]) -> str:
    r"""A decimal whose last digits repeat: 0.1\overline{6} is (16 - 1) / 90."""
    once = match["once"]
    repeated = match["group"] or match["digit"] or f"{match['first']}{match['middle'] or ''}{match['last'] or ''}"
    if len(match[0]) > MOST_REPEATING:
        raise NotUnderstood("it has a number of too many digits")
    top = int(f"{match['whole']}{once}{repeated}") - int(f"{match['whole']}{once}" or "0")
    return f"({top}/{10 ** len(once) * (10 ** len(repeated) - 1)})"


def _tokens_of(kind: str | None, text: str, match: re.Match[str]) -> list[Token]:
    if kind in ("grouped", "number"):
        if len(text) > MOST_DIGITS:
            raise NotUnderstood("it has a number of too many digits")
        return [Token("number", text.replace(",", ""))]
    if kind == "letters":
        return _letters(text)
    if kind == "command":
        return [_command(match["command"])]
    if kind == "words":
        words = match["words"].strip()
        if words[:1].isascii() and words[:1].isdigit():
            # \\textbf{5}, \\text{5 cm}
            return tokens_of(words)
        return [Token("mark", words)] if words in ("or", "and", "%") else _letters_or_words(words)
    if kind == "reals":
        return [Token("name", REALS)]
    if kind == "power":
        return [Token("mark", "^")]
    if kind == "relation":
        return [Token("mark", _RELATIONS[text])]
    return [] if kind is None else [Token("mark", text)]


def _letters_or_words(words: str) -> list[Token]:
    letter = words.strip("()") if len(words) <= 3 else words
    if len(letter) == 1 and letter.isascii() and letter.isalpha():
        return [Token("name", letter, upright=True)]
    return [Token("function", words)] if words in FUNCTIONS else [Token("words", words)] if words else []


def _letters(text: str) -> list[Token]:
    """A run of letters of plain text: a function, a constant, variables side by side, or a word."""
    if text in ("or", "and"):
        return [Token("mark", text)]
    known = _OTHER_NAMES.get(text, text)
    if known in FUNCTIONS:
        return [Token("function", known)]
    if text in ("pi", "Pi"):
        return [Token("name", "pi")]
    if text.lower() in ("inf", "infty", "infinity", "oo"):
        return [Token("name", "infinity")]
    if text == "U":
        return [Token("mark", "∪")]
    if text in UNIT_SYMBOLS:
        return [Token("words", text)]
    if len(text) == 1 or any(set(text) <= set(group) for group in ("xyz", "abcd", "mn", "pqr", "uvw", "rst")):
        return [Token("name", letter) for letter in text]
    if len(text) <= 3 and text.endswith(("pi", "x", "y", "z", "i")) and len(set(text)) == len(text):
        names = [*text.removesuffix("pi"), "pi"] if text.endswith("pi") else [*text]
        return [Token("name", name) for name in names]
    return [Token("words", text)]


def _command(name: str) -> Token:
    if name in _COMMANDS:
        return Token("command", name)
    if name in FUNCTIONS or name in _OTHER_NAMES:
        return Token("function", _OTHER_NAMES.get(name, name))
    if name in ("pi", "infty"):
        return Token("name", "pi" if name == "pi" else "infinity")
    if name in ("varnothing", "emptyset"):
        return Token("name", "∅")
    if name in _GREEK:
        return Token("name", name)
    if name in _MARKS:
        return Token("mark", _MARKS[name])
    raise NotUnderstood(f"the command \\{name[:20]} is not known")
