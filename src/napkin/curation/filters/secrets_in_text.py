"""Keys of services in a text, by the prefixes and lengths that their issuers publish; and private keys.

What follows a prefix must look random. A prefix with an exact length behind it is hardly met by chance: enough entropy
is asked for, and no digit, which many keys lack. Where the length is open and words may be joined by hyphens, a digit
is. A text is searched for literal prefixes, and each pattern is bounded: time grows with the text's length only.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator

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


def _any_of(prefixes: list[str]) -> re.Pattern[str]:
    """A pattern of all prefixes by their first character, to which `re` skips: thrice as fast as a search for each."""
    initials = sorted({prefix[0] for prefix in prefixes})
    rests = {initial: [re.escape(prefix[1:]) for prefix in prefixes if prefix[0] == initial] for initial in initials}
    return re.compile("|".join(f"{initial}(?:{'|'.join(rest)})" for initial, rest in rests.items()))


_PREFIX = _any_of(list(_PATTERNS))
_BEGIN, _END = re.compile(r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY-----"), re.compile(r"-----END [A-Z0-9 ]{0,40}-----")


def secrets_in(text: str) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of keys in a text: those with a prefix in their order, then private keys."""
    end = 0
    for found in _PREFIX.finditer(text):
        at = found.start()
        if at < end or (at and (text[at - 1].isalnum() or text[at - 1] == "_")):
            continue
        pattern, is_open = _PATTERNS[found[0]]
        match = pattern.match(text, found.end())
        if match and looks_random(match[1], may_be_words=is_open):
            end = match.end()
            yield at, end
    if "-----BEGIN " in text:
        for begin in _BEGIN.finditer(text):
            end = _END.search(text, begin.end(), begin.end() + MAX_PRIVATE_KEY)
            if end:
                yield begin.start(), end.end()


def looks_random(characters: str, *, may_be_words: bool) -> bool:
    """Whether characters have the entropy of random ones; words joined by hyphens have it too, but no digit."""
    if may_be_words and not characters.isalnum() and not any(each.isdigit() for each in characters):
        return False
    return entropy(characters) >= MIN_ENTROPY


def entropy(characters: str) -> float:
    """The entropy of the frequencies of characters, in bits per character."""
    n = len(characters)
    return -sum(count / n * math.log2(count / n) for count in Counter(characters).values())
