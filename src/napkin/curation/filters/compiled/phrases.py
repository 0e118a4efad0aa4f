"""The phrases of C4, found from one rare letter of each. Letters may be capitals; no other character is folded."""

from typing import Any

from napkin.machine_code.compiled_function import jitted

LOREM_IPSUM, JAVASCRIPT, POLICY = 1, 2, 4

_LOREM = tuple(b"lorem ipsum")
_TERMS = tuple(b"terms of use")
_JAVASCRIPT = tuple(b"javascript")
_PRIVACY = tuple(b"privacy policy")
_COOKIE_POLICY = tuple(b"cookie policy")
_USES_COOKIES = tuple(b"uses cookies")
_USE_OF_COOKIES = tuple(b"use of cookies")
_USE_COOKIES = tuple(b"use cookies")


@jitted
def phrases_around(byte: Any, i: Any, n: Any) -> Any:
    """Look for phrases that contain the letter at `i`: one of m, v, k or a capital of them."""
    letter = byte[i] | 0x20
    if letter == 109:  # m
        if _stands(byte, i - 4, n, _LOREM):
            return LOREM_IPSUM
        return POLICY if _stands(byte, i - 3, n, _TERMS) else 0
    if letter == 118:  # v
        if _stands(byte, i - 2, n, _JAVASCRIPT):
            return JAVASCRIPT
        return POLICY if _stands(byte, i - 3, n, _PRIVACY) else 0
    if _stands(byte, i - 3, n, _COOKIE_POLICY) or _stands(byte, i - 8, n, _USES_COOKIES):
        return POLICY
    if _stands(byte, i - 10, n, _USE_OF_COOKIES) or _stands(byte, i - 7, n, _USE_COOKIES):
        return POLICY
    return 0


@jitted
def _stands(byte: Any, i: Any, n: Any, phrase: Any) -> Any:
    """True if a phrase of lower-case letters and spaces stands at `i`."""
    if i < 0 or i + len(phrase) > n:
        return False
    for k in range(len(phrase)):
        code = byte[i + k]
        if 65 <= code <= 90:
            code |= 0x20
        if code != phrase[k]:
            return False
    return True
