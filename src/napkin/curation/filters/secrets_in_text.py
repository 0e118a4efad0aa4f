"""Keys of services in a text, by the prefixes and lengths that their issuers publish; and private keys.

What follows a prefix must look random: its characters have enough entropy, and digits are among them. A text is
searched for literal prefixes, and each pattern is bounded, so that time grows with the text's length only.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator

MIN_ENTROPY = 2.8
"""Bits per character of what follows the prefix. 16 random characters of base 32 have 3.6 in the mean, 16 of words
less than 3.3, and `xxxxxxxxxxxx1234` 1.6."""
MAX_PRIVATE_KEY = 2**14
"""Characters of a private key at most."""

# Prefix, and what follows it.
_FORMATS = (
    ("AKIA", "[A-Z2-7]{16}"),  # Amazon Web Services
    ("ASIA", "[A-Z2-7]{16}"),
    ("AIza", "[A-Za-z0-9_-]{35}"),  # Google
    ("ghp_", "[A-Za-z0-9]{36}"),  # GitHub
    ("gho_", "[A-Za-z0-9]{36}"),
    ("ghu_", "[A-Za-z0-9]{36}"),
    ("ghs_", "[A-Za-z0-9]{36}"),
    ("ghr_", "[A-Za-z0-9]{36}"),
    ("github_pat_", "[A-Za-z0-9_]{82}"),
    ("glpat-", "[A-Za-z0-9_-]{20}"),  # GitLab
    ("xoxb-", "[A-Za-z0-9-]{20,200}"),  # Slack
    ("xoxp-", "[A-Za-z0-9-]{20,200}"),
    ("xoxa-", "[A-Za-z0-9-]{20,200}"),
    ("sk_live_", "[A-Za-z0-9]{24,200}"),  # Stripe
    ("rk_live_", "[A-Za-z0-9]{24,200}"),
    ("sk-", "[A-Za-z0-9_-]{32,200}"),  # OpenAI, Anthropic
    ("hf_", "[A-Za-z0-9]{34}"),  # Hugging Face
    ("npm_", "[A-Za-z0-9]{36}"),
    ("pypi-", "[A-Za-z0-9_-]{60,250}"),
    ("SG.", r"[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}"),  # SendGrid
    # Three parts of a signed JSON web token.
    ("eyJ", r"[A-Za-z0-9_-]{10,2000}\.eyJ[A-Za-z0-9_-]{10,4000}\.[A-Za-z0-9_-]{20,1000}"),
)
_PATTERNS = tuple((prefix, re.compile(f"{re.escape(prefix)}({body})(?![A-Za-z0-9_])")) for prefix, body in _FORMATS)
_BEGIN, _END = re.compile(r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY-----"), re.compile(r"-----END [A-Z0-9 ]{0,40}-----")


def secrets_in(text: str) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of keys in a text, of each format in order."""
    for prefix, pattern in _PATTERNS:
        at = text.find(prefix)
        while at >= 0:
            match = None if at and (text[at - 1].isalnum() or text[at - 1] == "_") else pattern.match(text, at)
            if match and looks_random(match[1]):
                yield match.span()
            at = text.find(prefix, match.end() if match else at + len(prefix))
    if "-----BEGIN " in text:
        for begin in _BEGIN.finditer(text):
            end = _END.search(text, begin.end(), begin.end() + MAX_PRIVATE_KEY)
            if end:
                yield begin.start(), end.end()


def looks_random(characters: str) -> bool:
    """Whether characters have MIN_ENTROPY, and a digit is among them."""
    return any(each.isdigit() for each in characters) and entropy(characters) >= MIN_ENTROPY


def entropy(characters: str) -> float:
    """The entropy of the frequencies of characters, in bits per character."""
    n = len(characters)
    return -sum(count / n * math.log2(count / n) for count in Counter(characters).values())
