"""Unicode's normal form C: a letter and its accent are one character where there is one (Qwen's tokenizers need it).

Normalization is lossy: `decode(encode(text))` is the normal form of the text, which looks the same.
"""

import re
from unicodedata import is_normalized, normalize

# The library that reads tokenizer.json has the tables of Unicode 9.0: combining characters and compositions that came
# later, up to 18.0, stay as and where they are. Hexadecimal code points, and ranges of them.
_NEWER = """
5c8-5c9 7fd 897-89f 8ca-8d3 9fe c3c d3b-d3c eba 1715 1abf-1af0 1df6-1dfa a82c 105c9 105d2 105da 105e4
10d24-10d27 10d69-10d6d 10eab-10eac 10ecb-10ecf 10ef0-10efb 10efd-10eff 10f46-10f50 10f82-10f85 11070 1133b
11383 11385 1138e 11391 113b8 113bb 113c2 113c5 113c7-113c9 113ce-113d0 1145e 11839-1183a 11930 11938
1193d-1193e 11943 119e0 11a34 11a47 11a99 11d42 11d44-11d45 11d97 11f41-11f42 1611e-16129 1612f 16d67-16d6a
16ff0-16ff1 1d127-1d128 1d250-1d252 1d25b-1d25c 1d25f 1d280-1d281 1e08f 1e130-1e136 1e2ae 1e2ec-1e2ef
1e4ec-1e4ef 1e5ee-1e5ef 1e6e3 1e6e6 1e6ee-1e6ef 1e6f5
"""


def normal_form_c(text: str) -> str:
    r"""The text in normal form C, as Hugging Face's `tokenizers` makes it.

    >>> normal_form_c("e\u0301") == "\u00e9"
    True
    """
    if text.isascii():
        return text
    if _IS_NEWER.search(text):
        return "".join(normalize("NFC", part) for part in _IS_NEWER.split(text))
    return text if is_normalized("NFC", text) else normalize("NFC", text)


def _character_class(ranges: str) -> str:
    ends = ([chr(int(end, 16)) for end in each.split("-")] for each in ranges.split())
    return "".join("-".join(pair) for pair in ends)


# With a group, split also returns what it splits at.
_IS_NEWER = re.compile(f"([{_character_class(_NEWER)}])")
