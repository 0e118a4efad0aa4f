"""Places of a text at which personal data may stand, found in one pass, so that patterns are tried there alone.

Most of a text holds nothing personal, and a pattern that looks at all of it takes most of the time. Whatever the
patterns of `personal_data.py` find begins at one of these places or lies within one.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from napkin.curation.filters.compiled import FILTERS
from napkin.curation.filters.document_counts import MAX_BYTES, use_compiled
from napkin.errors import NapkinError

MODULES = ("personal",)
Span = tuple[int, int]


@dataclass
class Places:
    """Where to look, in the order of the text."""

    numbers: list[Span] = field(default_factory=list)
    """Spans of digits, blanks and what stands between digits, with eight digits at least."""
    dotted: list[Span] = field(default_factory=list)
    """Spans of that kind with at least three full stops and four digits."""
    ats: list[int] = field(default_factory=list)
    """At signs."""
    accounts: list[int] = field(default_factory=list)
    """Two capitals and two digits that no letter or digit stands before."""
    addresses: list[int] = field(default_factory=list)
    """A 2 or 3 that no letter or digit stands before, with a colon four characters on."""
    keys: list[int] = field(default_factory=list)
    """Where a word begins, or what may follow an escaped character, with three characters that a key may begin with."""


_BEGINS = {
    "ats": re.compile("@"),
    "accounts": re.compile("(?=[A-Z]{2}[0-9]{2})"),
    "addresses": re.compile("(?=[23][0-9A-Fa-f]{3}:)"),
}


class PlaceFinder:
    """Finds the places of texts, for keys that begin with given prefixes, of three ASCII characters at least."""

    def __init__(self, prefixes: Iterable[str]) -> None:
        self._prefixes = tuple(prefixes)
        self._begins = {**_BEGINS, "keys": re.compile("|".join(map(re.escape, self._prefixes)))}
        self._tables: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None

    def __call__(self, text: str) -> Places:
        """Raises NapkinError for a text of more than MAX_BYTES bytes."""
        if use_compiled(len(text), MODULES):
            return self.compiled(text)
        return self.plain(text)

    def plain(self, text: str) -> Places:
        """The places by regular expressions; patterns of numbers then look everywhere."""
        starts = {name: [found.start() for found in begin.finditer(text)] for name, begin in self._begins.items()}
        everywhere = [(0, len(text))]
        return Places(everywhere, everywhere, **starts)

    def compiled(self, text: str) -> Places:
        """The places by machine code."""
        FILTERS.load(*MODULES)
        from napkin.curation.filters.compiled import personal

        data = text.encode("utf-8", "surrogatepass") + bytes(4)
        n = len(data) - 4
        if n > MAX_BYTES:
            raise NapkinError(f"a text has {n:,} bytes, and at most {MAX_BYTES:,} are searched: divide it")
        if self._tables is None:
            self._tables = _classes(), self._grams()
        content = np.frombuffer(data, np.uint8)
        # At most two per character; pages that are not written take no memory.
        found = np.empty((2 * n + 2, 3), np.int32)
        addresses = [each.ctypes.data for each in (*self._tables, found)]
        count = personal.find_places(content.ctypes.data, n, *addresses)
        places = Places()
        spans = {personal.NUMBER: places.numbers, personal.DOTTED: places.dotted}
        starts = {
            personal.AT: places.ats,
            personal.ACCOUNT: places.accounts,
            personal.ADDRESS: places.addresses,
            personal.KEY: places.keys,
        }
        for kind, begin, end in found[:count].tolist():
            if kind in spans:
                spans[kind].append((begin, end))
            else:
                starts[kind].append(begin)
        return places

    def _grams(self) -> NDArray[np.uint8]:
        from napkin.curation.filters.compiled.personal import GRAM_BITS

        grams = np.zeros(1 << GRAM_BITS, np.uint8)
        for prefix in self._prefixes:
            first, second, third = prefix[:3].encode()
            grams[(first * 961 + second * 31 + third) & ((1 << GRAM_BITS) - 1)] = 1
        return grams


def _classes() -> NDArray[np.uint8]:
    from napkin.curation.filters.compiled import personal

    classes = np.zeros(256, np.uint8)
    for code in range(128):
        character = chr(code)
        if character in "0123456789":
            classes[code] |= personal.DIGIT
        if character in "0123456789(+":
            classes[code] |= personal.OPENS_NUMBER
        if character in "0123456789 ().-/+":
            classes[code] |= personal.IN_NUMBER
        if character.isupper():
            classes[code] |= personal.UPPER
        if character.isalnum():
            classes[code] |= personal.ALPHANUMERIC
        if character.isalnum() or character == "_":
            classes[code] |= personal.WORD
        if character in "@\\%":
            classes[code] |= personal.WATCHED
    classes[0x80:0xC0] = personal.CONTINUES
    return classes
