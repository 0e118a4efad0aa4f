"""Masks personal data and secrets: mail addresses, telephone numbers, network addresses, keys, cards, accounts.

Each kind is searched for by a pattern, at places that one pass over the text finds (`personal_places.py`). A pattern
reads a bounded number of characters from there, so that no text takes more than linear time; whatever has a check
(Luhn's digit, the remainder of an IBAN, a valid and public address) is masked only if that holds.

Payment cards (ISO/IEC 7812, Luhn) and bank accounts (ISO 13616, IBAN) carry their own check. Keys of services are found
by the prefixes and lengths that their issuers publish; what follows a prefix must look random. A prefix followed by an
exact length is unlikely by chance: enough entropy is required, but no digit, which many keys lack. Where the length is
open and words may be joined by hyphens, a digit is required too. A text is searched for literal prefixes, and each
pattern is bounded: time grows with the text's length only.
"""

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from napkin.curation.filters.personal_places import PlaceFinder, Places, Span
from napkin.curation.stage import Record, TraceEntry
from napkin.errors import NapkinError, suggestion

_IBAN_LENGTHS = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18 DO28 EE20 EG29 "
    "ES24 FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 "
    "LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29 PT25 "
    "QA29 RO24 RS22 RU33 SA24 SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20"
)
IBAN_LENGTHS = {each[:2]: int(each[2:]) for each in _IBAN_LENGTHS.split()}
"""Characters of an IBAN, by country."""

# First digits of card numbers, as a range of prefixes of one length, with the lengths of the numbers.
_CARDS = (
    ("4", "4", (13, 16, 19)),  # Visa
    ("51", "55", (16,)),  # Mastercard
    ("2221", "2720", (16,)),
    ("34", "34", (15,)),  # American Express
    ("37", "37", (15,)),
    ("300", "305", (14, 16, 19)),  # Diners Club
    ("36", "36", (14, 16, 19)),
    ("38", "39", (14, 16, 19)),
    ("6011", "6011", (16, 19)),  # Discover
    ("644", "659", (16, 19)),
    ("3528", "3589", (16, 17, 18, 19)),  # JCB
    ("62", "62", (16, 17, 18, 19)),  # UnionPay
)


def is_card_number(digits: str) -> bool:
    """True for a payment card's number: a known issuer, its length, and a right check digit."""
    known = any(len(digits) in lengths and first <= digits[: len(first)] <= last for first, last, lengths in _CARDS)
    return known and luhn_sum(digits) % 10 == 0


def luhn_sum(digits: str) -> int:
    """Luhn's sum: every second digit from the right but one is doubled, and 9 subtracted if that has two digits."""
    odd, even = digits[-1::-2], digits[-2::-2]
    return sum(map(int, odd)) + sum(sum(divmod(2 * int(digit), 10)) for digit in even)


def is_iban(account: str) -> bool:
    """True for an IBAN of upper-case letters and digits: its country's length, and 1 as the remainder modulo 97."""
    if IBAN_LENGTHS.get(account[:2]) != len(account):
        return False
    # A letter stands for two digits: A is 10.
    return int("".join(str(int(each, 36)) for each in account[4:] + account[:4])) % 97 == 1


MIN_ENTROPY = 2.5
"""Bits per character of what follows the prefix. 16 random characters of base 32 have 3.6 in the mean, and fewer than 1
in 100,000 keys has less than 2.5; `xxxxxxxxxxxx1234` has 1.6."""
MAX_PRIVATE_KEY = 2**14
"""Characters of a private key at most."""

_ALNUM, _URL, _HEX = "[A-Za-z0-9]", "[A-Za-z0-9_-]", "[0-9a-f]"
# Prefixes, and what follows them.
_EXACT = {
    "AKIA ASIA ABIA ACCA": "[A-Z0-9]{16}",  # Amazon Web Services
    "A3T": "[A-Z0-9]{17}",
    "AIza": f"{_URL}{{35}}",  # Google
    "GOCSPX-": f"{_URL}{{28}}",
    "ghp_ gho_ ghu_ ghs_ ghr_": f"{_ALNUM}{{36}}",  # GitHub
    "github_pat_": "[A-Za-z0-9_]{82}",
    # GitLab; the longer form says its own length.
    "glpat-": rf"{_URL}{{20}}(?![A-Za-z0-9_-])|{_URL}{{27,300}}\.[0-9a-z]{{9}}|{_URL}{{20}}",
    "glrt-": rf"t[0-9]_{_URL}{{27,300}}\.[0-9a-z]{{9}}|{_URL}{{20}}",
    "gldt- glft- glffct- glsoat- GR1348941": f"{_URL}{{20}}",
    "glptt-": f"{_HEX}{{40}}",
    "glimt-": f"{_URL}{{25}}",
    "glagent-": f"{_URL}{{50}}",
    "gloas-": f"{_URL}{{64}}",
    "glcbt-": f"{_ALNUM}{{1,5}}_{_URL}{{20}}",
    "sk_live_ rk_live_ sk_test_ rk_test_": f"{_ALNUM}{{24,200}}",  # Stripe
    "hf_ api_org_": f"{_ALNUM}{{34}}",  # Hugging Face
    "npm_": f"{_ALNUM}{{36}}",
    "SG.": rf"{_URL}{{22}}\.{_URL}{{43}}",  # SendGrid
    "shpat_ shpca_ shppa_ shpss_": "[0-9a-fA-F]{32}",  # Shopify
    "dop_v1_ doo_v1_ dor_v1_": f"{_HEX}{{64}}",  # DigitalOcean
    "dapi": f"{_HEX}{{32}}",  # Databricks
    "glsa_": f"{_ALNUM}{{32}}_[0-9A-Fa-f]{{8}}",  # Grafana
    "lin_api_": f"{_ALNUM}{{40}}",  # Linear
    "ntn_": f"[0-9]{{11}}{_ALNUM}{{35}}",  # Notion
    "gsk_": f"{_ALNUM}{{52}}",  # Groq
    "pplx-": f"{_ALNUM}{{48}}",  # Perplexity
    "pul-": f"{_HEX}{{40}}",  # Pulumi
    "PMAK-": f"{_HEX}{{24}}-{_HEX}{{34}}",  # Postman
    "rubygems_": f"{_HEX}{{48}}",
    "LTAI": f"{_ALNUM}{{20}}",  # Alibaba
    "dckr_pat_": f"{_URL}{{27}}",  # Docker
    "dckr_oat_": f"{_URL}{{32}}",
    "figd_": f"{_URL}{{40}}",  # Figma
    "r8_": f"{_ALNUM}{{37}}",  # Replicate
    "xai-": f"{_ALNUM}{{80}}",
    "AccountKey=": "[A-Za-z0-9+/]{86}==",  # Azure
    "ATATT3": "[A-Za-z0-9_=-]{186}",  # Atlassian
    "HRKU-AA": f"{_URL}{{58}}",  # Heroku
    "AGE-SECRET-KEY-1": "[QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L]{58}",
    "hooks.slack.com/services/": "T[A-Z0-9]{8,12}/B[A-Z0-9]{8,12}/[A-Za-z0-9]{24}",
    # Three parts of a signed JSON web token.
    "eyJ": rf"{_URL}{{10,2000}}\.eyJ{_URL}{{10,4000}}\.{_URL}{{20,1000}}",
}
_OPEN = {
    "xoxb- xoxp- xoxa- xoxr- xoxs- xoxe- xoxe. xapp-": "[A-Za-z0-9.-]{20,250}",  # Slack
    "sk-": f"{_URL}{{32,250}}",  # OpenAI, Anthropic
    "pypi-": f"{_URL}{{60,250}}",
    "hvs.": f"{_URL}{{90,200}}",  # HashiCorp Vault
}
_PATTERNS = {
    prefix: (re.compile(f"({body})(?![A-Za-z0-9_])"), formats is _OPEN)
    for formats in (_EXACT, _OPEN)
    for prefixes, body in formats.items()
    for prefix in prefixes.split()
}
_RESTS = {
    initial: "|".join(re.escape(prefix[1:]) for prefix in _PATTERNS if prefix[0] == initial)
    for initial in sorted({prefix[0] for prefix in _PATTERNS})
}
_PREFIX = re.compile("|".join(f"{initial}(?:{rests})" for initial, rests in _RESTS.items()))
"""All prefixes by their first character."""
_PLACES = PlaceFinder(_PATTERNS)
_BEFORE_KEY = re.compile(r"(?:\A|[^A-Za-z0-9_]|\\[nrt]|%[0-9A-Fa-f]{2})\Z")
"""A key follows this: no letter or digit of ASCII, unless it ends an escaped line feed or a character of an address
(`%3D`). Chinese has no space before it."""
_BEGIN, _END = re.compile(r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY-----"), re.compile(r"-----END [A-Z0-9 ]{0,40}-----")


def _secrets(text: str, places: Places) -> Iterator[Span]:
    """Keys in a text: those with a prefix in their order, then private keys."""
    end = 0
    for at in places.keys:
        prefix = _PREFIX.match(text, at) if at >= end else None
        if not prefix or not _BEFORE_KEY.search(text, max(0, at - 3), at):
            continue
        pattern, is_open = _PATTERNS[prefix[0]]
        match = pattern.match(text, prefix.end())
        if match and _looks_random(match[1], may_be_words=is_open):
            end = match.end()
            yield at, end
    if "-----BEGIN " in text:
        for begin in _BEGIN.finditer(text):
            end = _END.search(text, begin.end(), begin.end() + MAX_PRIVATE_KEY)
            if end:
                yield begin.start(), end.end()


def _looks_random(characters: str, *, may_be_words: bool) -> bool:
    """True for the entropy of random characters; words joined by hyphens have it too, but no digit."""
    if may_be_words and not characters.isalnum() and not any(each.isdigit() for each in characters):
        return False
    shares = [count / len(characters) for count in Counter(characters).values()]
    return -sum(share * math.log2(share) for share in shares) >= MIN_ENTROPY


TOKENS = {"secret": "<SECRET>", "mail": "<EMAIL>", "iban": "<IBAN>", "card": "<CARD>", "ip": "<IP>", "phone": "<PHONE>"}
"""The mask of each kind. Of kinds that overlap, the first in this order is masked."""

_LOCAL_PART = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._%+-"
MAX_LOCAL_PART = 64
"""Characters before the sign in a mail address (RFC 5321)."""
_AT_DOMAIN = re.compile(r"@((?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24})(?![A-Za-z0-9-])")
# Each pattern begins with a literal character and only then looks at the one before it: `re` skips quickly to a
# literal.
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
# Elsewhere numbers within a country begin with a 0: in pairs, as in France, or an area and one or two groups. Where the
# area is a single digit, as in Australia or of mobile telephones in the Netherlands, eight digits follow.
_TRUNK = re.compile(
    r"[(0](?<![0-9A-Za-z.,/:+=(-][(0])(?<![0-9][ .-][(0])(?:(?<=\()0)?[1-9]"
    r"(?:(?:([ .-])[0-9]{2})(?:\1[0-9]{2}){3}|\)[ -]?[0-9]{4}[ -]?[0-9]{4}|[ -](?!19|20)[0-9]{8}"
    r"|[0-9]{1,4}(?:\)[ /-]?|[ /-])[0-9]{3,8}(?:[ -][0-9]{3,6})?)"
    r"(?![0-9A-Za-z/:=-]|[.,][0-9]|[ -][0-9])"
)
# Ten digits in North America's forms, whether there is such an area and exchange or not.
_TEN_DIGITS = re.compile(
    r"[(0-9](?<![0-9A-Za-z.,_/+=`#-][(0-9])(?:(?<=\()[0-9]{3}\)[ .-]?|(?<=[0-9])[0-9]{2}[ .-]?)"
    r"[0-9]{3}[ .-]?[0-9]{4}(?![0-9A-Za-z_/+=`-]|[.,][0-9])"
)
_TRUNK_DIGITS = range(10, 13)
"""Nine digits are a ZIP code of North America with its extension."""
_VERSION_CONTROL = ("git", "hg", "svn", "bzr", "cvs")
"""Local parts that are the account of a server of programs: git@github.com is not a person's mail address."""


def mask_personal_data(
    text: str, kinds: Sequence[str] = tuple(TOKENS), *, unassigned: bool = False
) -> tuple[str, dict[str, int]]:
    """The text with tokens in the place of personal data, and how many of each kind were masked.

    With `unassigned` also IP addresses and telephone numbers that are not assigned, such as examples in manuals:

    >>> mask_personal_data("at 192.0.2.1 or 555-155-1234", unassigned=True)
    ('at <IP> or <PHONE>', {'ip': 1, 'phone': 1})
    """
    return mask_at(text, _PLACES(text), kinds, unassigned=unassigned)


def mask_at(
    text: str, places: Places, kinds: Sequence[str] = tuple(TOKENS), *, unassigned: bool = False
) -> tuple[str, dict[str, int]]:
    """`mask_personal_data` for a text whose places to look at are known."""
    finders = _FINDERS | _UNASSIGNED_FINDERS if unassigned else _FINDERS
    spans = sorted(
        (begin, priority, end, kind)
        for priority, kind in enumerate(kinds)
        for begin, end in dict.fromkeys(finders[kind](text, places))
    )
    if not spans:
        return text, {}
    kept: list[tuple[int, int, int, str]] = []
    for span in spans:
        while kept and span[0] < kept[-1][2] and span[1] < kept[-1][1]:
            kept.pop()
        if not kept or span[0] >= kept[-1][2]:
            kept.append(span)
    pieces, at = [], 0
    for begin, _, end, kind in kept:
        pieces += text[at:begin], TOKENS[kind]
        at = end
    return "".join([*pieces, text[at:]]), dict(Counter(kind for *_, kind in kept))


def _matches(pattern: re.Pattern[str], text: str, starts: Sequence[int]) -> Iterator[re.Match[str]]:
    """The matches of a pattern that begin at one of these places, as `finditer` gives them."""
    end = 0
    for start in starts:
        match = pattern.match(text, start) if start >= end else None
        if match:
            end = match.end()
            yield match


BEHIND = 2
"""The number of characters that a pattern of numbers looks at after its match."""


def _within(pattern: re.Pattern[str], text: str, spans: Sequence[Span]) -> Iterator[re.Match[str]]:
    """The matches of a pattern within these spans, as `finditer` gives them."""
    for begin, end in spans:
        yield from pattern.finditer(text, begin, end + BEHIND)


def _mails(text: str, places: Places) -> Iterator[Span]:
    previous = 0
    for match in _matches(_AT_DOMAIN, text, places.ats):
        before = text[max(previous, match.start() - MAX_LOCAL_PART - 1) : match.start()]
        # Two full stops in a row belong to the sentence before.
        local = before[len(before.rstrip(_LOCAL_PART)) :].rpartition("..")[2].lstrip(".-%")
        previous = match.end()
        if 1 <= len(local) <= MAX_LOCAL_PART and local not in _VERSION_CONTROL:
            yield match.start() - len(local), match.end()


def _ibans(text: str, places: Places) -> Iterator[Span]:
    for match in _matches(_IBAN, text, places.accounts):
        length = IBAN_LENGTHS.get(match[0][:2])
        if length is None:
            continue
        # The pattern may have taken words in capitals that follow.
        digits = [i for i in range(*match.span()) if text[i] != " "][:length]
        end = digits[-1] + 1
        grouped = text[match.start() : end]
        even = " " not in grouped or all(len(group) == 4 for group in grouped.split(" ")[:-1])
        if even and not text[end : end + 1].isalnum() and is_iban(grouped.replace(" ", "")):
            yield match.start(), end


def _cards(text: str, places: Places) -> Iterator[Span]:
    for match in _within(_CARD, text, places.numbers):
        if is_card_number(match[0].replace(" ", "").replace("-", "")):
            yield match.span()


def _addresses(text: str, places: Places) -> Iterator[Span]:
    return (span for span, address in _all_addresses(text, places) if address.is_global)


def _all_addresses(text: str, places: Places) -> Iterator[tuple[Span, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    for match in chain(_within(_IPV4, text, places.dotted), _matches(_IPV6, text, places.addresses)):
        with suppress(ValueError):
            yield match.span(), ipaddress.ip_address(match[0])


def _phones(text: str, places: Places) -> Iterator[Span]:
    for match in _within(_INTERNATIONAL, text, places.numbers):
        if sum(map(str.isdigit, match[0])) in _PHONE_DIGITS:
            yield match.span()
    for match in _within(_NATIONAL, text, places.numbers):
        yield match.span()
    for match in _within(_PLAIN, text, places.numbers):
        if all(abs(int(match[0]) - limit) > 1000 for limit in _LIMITS_OF_INTEGERS):
            yield match.span()
    for match in _within(_TRUNK, text, places.numbers):
        digits = "".join(filter(str.isdigit, match[0]))
        # A dump of bytes has pairs of digits too, most of which begin with a 0.
        dumped = match[1] is not None and digits[2::2].count("0") > 2
        if len(digits) in _TRUNK_DIGITS and ("(" in match[0]) == (")" in match[0]) and not dumped:
            yield match.span()


_FINDERS: dict[str, Callable[[str, Places], Iterator[Span]]] = {
    "secret": _secrets,
    "mail": _mails,
    "iban": _ibans,
    "card": _cards,
    "ip": _addresses,
    "phone": _phones,
}
_UNASSIGNED_FINDERS: dict[str, Callable[[str, Places], Iterator[Span]]] = {
    "ip": lambda text, places: (span for span, _ in _all_addresses(text, places)),
    "phone": lambda text, places: chain(
        _phones(text, places), (match.span() for match in _within(_TEN_DIGITS, text, places.numbers))
    ),
}


@dataclass(frozen=True)
class PersonalData:
    """Mask mail addresses, telephone numbers, public IP addresses, keys of services, card numbers and accounts (IBAN).

    The counts go into the record's field `personal_data`. Version numbers such as 8.8.4.4 look like addresses.
    """

    name: ClassVar[str] = "personal-data"

    kinds: tuple[str, ...] = tuple(TOKENS)
    """The kinds of data to mask: secret, mail, iban, card, ip and phone."""
    unassigned: bool = False
    """Mask also IP addresses that are not public, and ten digits in the forms of North America's telephone numbers that
    are not assigned there."""

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in TOKENS:
                raise NapkinError(f"kinds has '{kind}': {suggestion(kind, TOKENS)}")

    def apply(self, record: Record) -> Record:
        # In the order of TOKENS, whatever the order of the option.
        kinds = [kind for kind in TOKENS if kind in self.kinds]
        record.text, counts = mask_personal_data(record.text, kinds, unassigned=self.unassigned)
        if counts:
            record.fields["personal_data"] = counts
        note = ", ".join(f"{kind}: {count}" for kind, count in counts.items())
        record.trace.append(TraceEntry(self.name, note))
        return record
