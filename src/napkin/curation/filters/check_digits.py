"""Numbers that carry their own check: payment cards (ISO/IEC 7812, Luhn) and bank accounts (ISO 13616, IBAN)."""

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
    """Whether digits are a payment card's number: a known issuer, its length, and a right check digit."""
    known = any(len(digits) in lengths and first <= digits[: len(first)] <= last for first, last, lengths in _CARDS)
    return known and luhn_sum(digits) % 10 == 0


def luhn_sum(digits: str) -> int:
    """Luhn's sum: every second digit from the right but one is doubled, and 9 subtracted if that has two digits."""
    odd, even = digits[-1::-2], digits[-2::-2]
    return sum(map(int, odd)) + sum(sum(divmod(2 * int(digit), 10)) for digit in even)


def is_iban(account: str) -> bool:
    """Whether upper-case letters and digits are an IBAN: its country's length, and 1 as the remainder modulo 97."""
    if IBAN_LENGTHS.get(account[:2]) != len(account):
        return False
    # A letter stands for two digits: A is 10.
    return int("".join(str(int(each, 36)) for each in account[4:] + account[:4])) % 97 == 1
