"""Arguments that are not written as JSON: values in the notations of Python and of Gemma's models for functions.

| notation | a call |
|---|---|
| Python | `weather(city="Rome", days=[1, 2], deep={"a": True})` |
| Gemma | `call:weather{city:<escape>Rome<escape>,days:[1,2],deep:{a:true}}`, texts between marks |

What is read is what JSON can hold, at most MOST_NESTED levels deep; all else is refused.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from napkin.errors import NapkinError

MOST_NESTED = 100
"""Levels of lists and objects in arguments, and in the schemas of functions."""
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Notation:
    """How values are written that are neither lists nor objects."""

    text: re.Pattern[str]
    """A text with its marks."""
    value_of: Callable[[str], str]
    """What a text with its marks says. Raises ValueError."""
    word: re.Pattern[str]
    """What else a value may be."""
    takes_words: bool
    """Words that are neither numbers nor constants are texts, whose marks were left out."""


_ESCAPES = re.compile(r"""\\x([0-9A-Fa-f]{2})|\\(.)|(["\x00-\x1f])""")


def _python_text(written: str) -> str:
    """What a text between quotes says, whose escapes become those of JSON first."""

    def escaped(found: re.Match[str]) -> str:
        if found[2] is None:
            return f"\\u00{found[1]}" if found[1] else f"\\u{ord(found[3]):04x}"
        if found[2] in 'bfnrtu"\\':
            return found[0]
        # A backslash before any other character is a backslash.
        return "'" if found[2] == "'" else f"\\\\{found[2]}"

    return msgspec.json.decode(f'"{_ESCAPES.sub(escaped, written[1:-1])}"', type=str)


PYTHON = Notation(
    re.compile(
        r"""
        " [^"\\\n]*+ (?: \\. [^"\\\n]*+ )*+ "
        | ' [^'\\\n]*+ (?: \\. [^'\\\n]*+ )*+ '
    """,
        re.VERBOSE,
    ),
    _python_text,
    re.compile(r"[\w.+-]+"),
    takes_words=False,
)


def gemma_notation(mark: str) -> Notation:
    """The notation of a Gemma model that writes `mark` before and after a text."""
    quoted = re.escape(mark)
    word = re.compile(rf"(?:(?!{quoted})[^,\[\]{{}}])+")
    return Notation(
        re.compile(f"{quoted}.*?{quoted}", re.DOTALL), lambda text: text[len(mark) : -len(mark)], word, True
    )


class NotationReader:
    """Reads names and values from a text, from a place on that moves."""

    def __init__(self, text: str, notation: Notation) -> None:
        self._text, self._notation, self._place = text, notation, 0

    def at_end(self) -> bool:
        """True where only white space is left."""
        self._skip()
        return self._place == len(self._text)

    def takes(self, mark: str) -> bool:
        """True if `mark` comes next, behind which the place is then."""
        self._skip()
        is_next = self._text.startswith(mark, self._place)
        self._place += len(mark) * is_next
        return is_next

    def need(self, mark: str) -> None:
        """Raise NapkinError unless `mark` comes next."""
        if not self.takes(mark):
            raise self._wrong(f"{mark!r} is missing")

    def name(self, *, before: str) -> str:
        """The name in front of `before`, behind which the place is then."""
        end = self._text.find(before, self._place)
        name = self._text[self._place : end].strip()
        if end < 0 or re.fullmatch(r"""[^,:=(){}\[\]"']+""", name) is None:
            raise self._wrong("a name is missing")
        self._place = end + len(before)
        return name

    def pairs(self, separator: str, closes: str, depth: int = 1) -> dict[str, Any]:
        """Names and values up to `closes`, behind which the place is then."""
        if depth > MOST_NESTED:
            raise self._wrong(f"there are more than {MOST_NESTED} levels")
        values: dict[str, Any] = {}
        while not self.takes(closes):
            key = self._quoted()
            if key is None:
                key = self.name(before=separator)
            else:
                self.need(separator)
            values[key] = self._value(depth)
            if not self.takes(","):
                self.need(closes)
                break
        return values

    def _value(self, depth: int) -> Any:
        if self.takes("{"):
            return self.pairs(":", "}", depth + 1)
        if self.takes("["):
            return self._items(depth + 1)
        text = self._quoted()
        return self._word() if text is None else text

    def _items(self, depth: int) -> list[Any]:
        if depth > MOST_NESTED:
            raise self._wrong(f"there are more than {MOST_NESTED} levels")
        values: list[Any] = []
        while not self.takes("]"):
            values.append(self._value(depth))
            if not self.takes(","):
                self.need("]")
                break
        return values

    def _quoted(self) -> str | None:
        self._skip()
        found = self._notation.text.match(self._text, self._place)
        if found is None:
            return None
        self._place = found.end()
        try:
            text = self._notation.value_of(found[0])
            # Half of a character outside of the basic plane is text for Python, and not for JSON.
            text.encode()
        except ValueError:
            raise self._wrong("a text is not one") from None
        return text

    def _word(self) -> Any:
        found = self._notation.word.match(self._text, self._place)
        word = found[0].strip() if found else ""
        if not word:
            raise self._wrong("a value is missing")
        self._place += len(found[0]) if found else 0
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        try:
            return msgspec.json.decode(word, type=int | float)
        except msgspec.MsgspecError:
            if self._notation.takes_words and word[0] not in "\"'":
                return word
            raise self._wrong("a value is none") from None

    _SPACE = re.compile(r"\s*+")

    def _skip(self) -> None:
        found = self._SPACE.match(self._text, self._place)
        self._place = found.end() if found else self._place

    def _wrong(self, what: str) -> NapkinError:
        return NapkinError(f"the call cannot be read: {what} at character {self._place}")


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the calls in Python's notation, `[f(x=1), g()]` or one without brackets.

    >>> python_calls("[f(x=[1, 'a']), g()]")
    [('f', {'x': [1, 'a']}), ('g', {})]

    Raises NapkinError for anything else.
    """
    reader, calls = NotationReader(text, PYTHON), list[tuple[str, dict[str, Any]]]()
    is_list = reader.takes("[")
    while True:
        calls.append((reader.name(before="("), reader.pairs("=", ")")))
        if not (is_list and reader.takes(",")):
            break
    if is_list:
        reader.need("]")
    if not reader.at_end():
        raise NapkinError("the call cannot be read: text follows it")
    return calls


def gemma_call(text: str, notation: Notation) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call in Gemma's notation, `call:f{x:1}`. Raises NapkinError for anything else."""
    reader = NotationReader(text, notation)
    reader.need("call:")
    call = reader.name(before="{"), reader.pairs(":", "}")
    if not reader.at_end():
        raise NapkinError("the call cannot be read: text follows it")
    return call


def as_python(name: str, arguments: Mapping[str, Any]) -> str:
    """A call in Python's notation."""
    return (
        f"{name}({', '.join(f'{each}={json.dumps(value, ensure_ascii=False)}' for each, value in arguments.items())})"
    )


def as_gemma(value: Any, mark: str) -> str:
    """A value in Gemma's notation, with `mark` before and after texts."""
    if isinstance(value, str):
        return f"{mark}{value}{mark}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{as_gemma(each, mark)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(as_gemma(each, mark) for each in value) + "]"
    return json.dumps(value)
