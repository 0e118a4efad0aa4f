"""Masks for what belongs to a person or opens a door: mail, telephone, network address, key, card, account.

Each kind is searched for by a pattern that begins at a literal or at a character that rarely stands in prose, and that
reads a bounded number of characters from there, so that no text takes more than linear time; whatever has a check
(Luhn's digit, the remainder of an IBAN, a valid and public address) is masked only if that holds.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from napkin.curation.filters.check_digits import IBAN_LENGTHS, is_card_number, is_iban
from napkin.curation.filters.secrets_in_text import secrets_in
from napkin.curation.record import Record, TraceEntry
from napkin.errors import NapkinError
from napkin.near_names import suggestion

Span = tuple[int, int]

TOKENS = {
    "secret": "<SECRET>",
    "mail": "<EMAIL>",
    "iban": "<IBAN>",
    "card": "<CARD>",
    "ip": "<IP>",
    "phone": "<PHONE>",
}
"""What stands in the place of each kind. Of kinds that overlap, the first in this order is masked."""

_LOCAL_PART = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._%+-"
MAX_LOCAL_PART = 64
"""Characters before the sign in a mail address (RFC 5321)."""
_AT_DOMAIN = re.compile(r"@((?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24})(?![A-Za-z0-9-])")
# Each begins with its first character and looks behind that one then: `re` skips quickly to such a character.
_IBAN = re.compile(r"[A-Z](?<![A-Za-z0-9][A-Z])[A-Z][0-9]{2}(?: ?[A-Z0-9]){11,30}")
_CARD = re.compile(
    r"[0-9](?<![0-9A-Za-z.,-][0-9])"
    r"(?:[0-9]{12,18}|[0-9]{3}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{1,4}(?:\1[0-9]{1,3})?|[0-9]{3}([ -])[0-9]{6}\2[0-9]{4,5})"
    r"(?![0-9A-Za-z]|[.,-][0-9])"
)
_IPV4 = re.compile(r"[0-9](?<![0-9A-Za-z.][0-9])[0-9]{0,2}(?:\.[0-9]{1,3}){3}(?![0-9A-Za-z]|\.[0-9])")
# Addresses of hosts begin with a 2 or a 3: 2000::/3 (RFC 4291).
_IPV6 = re.compile(r"[23](?<![0-9A-Za-z:.][23])[0-9A-Fa-f]{3}(?::[0-9A-Fa-f]{0,4}){2,7}(?![0-9A-Za-z:])")
# With a country's code (E.164).
_INTERNATIONAL = re.compile(r"\+(?<![0-9A-Za-z+]\+)[1-9][0-9 ().\-/]{6,22}[0-9](?![0-9A-Za-z])")
# As North America writes numbers.
_AREA = r"[2-9][0-9]{2}"
_NATIONAL = re.compile(
    r"[(1-9](?<![0-9A-Za-z.(-][(1-9])"
    rf"(?:(?<=1)[ .-](?:\({_AREA}\)[ .-]?|{_AREA}[ .-])|(?<=\(){_AREA}\)[ .-]?|(?<=[2-9])[0-9]{{2}}[ .-])"
    rf"{_AREA}[ .-][0-9]{{4}}(?![0-9A-Za-z-])"
)
_PHONE_DIGITS = range(8, 16)
# Ten digits of North America without a space: no area code has a 9 in the middle, and neither it nor the exchange is
# a service such as 911.
_PLAIN = re.compile(
    r"[2-9](?<![0-9A-Za-z.,_/+=`#-][2-9])(?!11)[0-8][0-9](?!.11)[2-9][0-9]{6}(?![0-9A-Za-z_/+=`-]|[.,][0-9])"
)
_LIMITS_OF_INTEGERS = (2**31, 2**32, 9876543210)
"""Numbers near which ten digits are not a telephone's: in texts on computers they are frequent."""
# Elsewhere numbers within a country begin with a 0: in pairs, as in France, or an area and one or two groups.
_TRUNK = re.compile(
    r"[(0](?<![0-9A-Za-z.,/:+=(-][(0])(?<![0-9][ .-][(0])(?:(?<=\()0)?[1-9]"
    r"(?:(?:([ .-])[0-9]{2})(?:\1[0-9]{2}){3}|[0-9]{1,4}(?:\)[ /-]?|[ /-])[0-9]{3,8}(?:[ -][0-9]{3,6})?)"
    r"(?![0-9A-Za-z/:=-]|[.,][0-9]|[ -][0-9])"
)
_TRUNK_DIGITS = range(10, 13)
"""Nine digits are a ZIP code of North America with its extension."""
_VERSION_CONTROL = ("git", "hg", "svn", "bzr", "cvs")
"""Local parts that are the account of a server of programs: git@github.com is not a person's mail address."""


def mask_personal_data(text: str, kinds: Sequence[str] = tuple(TOKENS)) -> tuple[str, dict[str, int]]:
    """The text with tokens in the place of personal data, and how many of each kind were masked."""
    spans = sorted(
        (begin, priority, end, kind)
        for priority, kind in enumerate(kinds)
        for begin, end in dict.fromkeys(_FINDERS[kind](text))
    )
    spans = _without_overlaps(spans)
    pieces, at = [], 0
    for begin, _, end, kind in spans:
        pieces += text[at:begin], TOKENS[kind]
        at = end
    return "".join([*pieces, text[at:]]), dict(Counter(kind for *_, kind in spans))


def _without_overlaps(spans: list[tuple[int, int, int, str]]) -> list[tuple[int, int, int, str]]:
    """Of spans that overlap, those of the earlier kind; spans are sorted by beginning and kind."""
    kept: list[tuple[int, int, int, str]] = []
    for span in spans:
        while kept and span[0] < kept[-1][2] and span[1] < kept[-1][1]:
            kept.pop()
        if not kept or span[0] >= kept[-1][2]:
            kept.append(span)
    return kept


def _mails(text: str) -> Iterator[Span]:
    previous = 0
    for match in _AT_DOMAIN.finditer(text):
        before = text[max(previous, match.start() - MAX_LOCAL_PART - 1) : match.start()]
        # Two full stops in a row belong to the sentence before.
        local = before[len(before.rstrip(_LOCAL_PART)) :].rpartition("..")[2].lstrip(".-%")
        previous = match.end()
        if 1 <= len(local) <= MAX_LOCAL_PART and local not in _VERSION_CONTROL:
            yield match.start() - len(local), match.end()


def _ibans(text: str) -> Iterator[Span]:
    for match in _IBAN.finditer(text):
        length = IBAN_LENGTHS.get(match[0][:2])
        if length is None:
            continue
        # The pattern may have taken words in capitals that follow.
        places = [i for i in range(*match.span()) if text[i] != " "][:length]
        end = places[-1] + 1
        grouped = text[match.start() : end]
        even = " " not in grouped or all(len(group) == 4 for group in grouped.split(" ")[:-1])
        if even and not text[end : end + 1].isalnum() and is_iban(grouped.replace(" ", "")):
            yield match.start(), end


def _cards(text: str) -> Iterator[Span]:
    for match in _CARD.finditer(text):
        if is_card_number(match[0].replace(" ", "").replace("-", "")):
            yield match.span()


def _addresses(text: str) -> Iterator[Span]:
    for pattern in (_IPV4, _IPV6):
        for match in pattern.finditer(text):
            try:
                public = ipaddress.ip_address(match[0]).is_global
            except ValueError:
                continue
            if public:
                yield match.span()


def _phones(text: str) -> Iterator[Span]:
    for match in _INTERNATIONAL.finditer(text):
        if sum(map(str.isdigit, match[0])) in _PHONE_DIGITS:
            yield match.span()
    for match in _NATIONAL.finditer(text):
        yield match.span()
    for match in _PLAIN.finditer(text):
        if all(abs(int(match[0]) - limit) > 1000 for limit in _LIMITS_OF_INTEGERS):
            yield match.span()
    for match in _TRUNK.finditer(text):
        digits = "".join(filter(str.isdigit, match[0]))
        # A dump of bytes has pairs of digits too, most of which begin with a 0.
        dumped = match[1] is not None and digits[2::2].count("0") > 2
        if len(digits) in _TRUNK_DIGITS and ("(" in match[0]) == (")" in match[0]) and not dumped:
            yield match.span()


_FINDERS: dict[str, Callable[[str], Iterator[Span]]] = {
    "secret": secrets_in,
    "mail": _mails,
    "iban": _ibans,
    "card": _cards,
    "ip": _addresses,
    "phone": _phones,
}


@dataclass(frozen=True)
class PersonalData:
    """Mask mail addresses, telephone numbers, public IP addresses, keys of services, card numbers and accounts (IBAN).

    The counts go into the record's field `personal_data`. Version numbers such as 8.8.4.4 look like addresses.
    """

    name: ClassVar[str] = "personal-data"

    kinds: tuple[str, ...] = tuple(TOKENS)
    """Which of secret, mail, iban, card, ip and phone are masked."""

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in TOKENS:
                raise NapkinError(f"kinds has '{kind}': {suggestion(kind, TOKENS)}")

    def apply(self, record: Record) -> Record:
        """The record with its text masked."""
        # In the order of TOKENS, whatever the order of the option.
        record.text, counts = mask_personal_data(record.text, [kind for kind in TOKENS if kind in self.kinds])
        if counts:
            record.fields["personal_data"] = counts
        note = ", ".join(f"{kind}: {count}" for kind, count in counts.items())
        record.trace.append(TraceEntry(self.name, note))
        return record
