"""One pass over a text for the places at which personal data may stand; `personal_places.py` says which.

The text is UTF-8; places are counted in characters. A place is three int32: its kind, its first character, and the one
after its last.
"""

from napkin.machine_code.compiled_function import CompiledFunction
from napkin.machine_code.pointers import i32_at, u8_at

DIGIT, OPENS_NUMBER, IN_NUMBER, UPPER, ALPHANUMERIC, WORD, CONTINUES, WATCHED = (1 << bit for bit in range(8))
"""What a byte is: WATCHED is "@", a backslash or a per cent sign, CONTINUES a later byte of a character."""
NUMBER, DOTTED, AT, ACCOUNT, ADDRESS, KEY = range(6)
FEWEST_DIGITS, FEWEST_DOTTED, DOTS = 8, 4, 3
GRAM_BITS = 14
_AT_SIGN, _BACKSLASH, _PERCENT, _DOT, _COLON, _TWO, _THREE = b"@\\%.:23"


@CompiledFunction
def find_places(text, n, classes, grams, places):
    """The number of places that are written for the `n` bytes at `text`, after which four zero bytes stand.

    `classes` are what each byte is, `grams` a byte for each hash of the first three bytes of a key: 1 where there is
    such a key.
    """
    byte, kind_of, known, place = u8_at(text), u8_at(classes), u8_at(grams), i32_at(places)
    found, at = 0, 0
    run, digits, dots, last = -1, 0, 0, 0
    before, escaped = 0, -1
    for i in range(n):
        kind = kind_of[byte[i]]
        if kind & CONTINUES:
            continue
        if run < 0:
            if kind & OPENS_NUMBER:
                run, digits, dots = at, 0, 0
        elif not kind & IN_NUMBER:
            if digits >= FEWEST_DIGITS:
                place[3 * found], place[3 * found + 1], place[3 * found + 2] = NUMBER, run, at
                found += 1
            if dots >= DOTS and digits >= FEWEST_DOTTED:
                place[3 * found], place[3 * found + 1], place[3 * found + 2] = DOTTED, run, at
                found += 1
            run = -1
        if run >= 0:
            digits += kind & DIGIT
            dots += byte[i] == _DOT
        if kind & WATCHED:
            code = byte[i]
            if code == _AT_SIGN:
                place[3 * found], place[3 * found + 1], place[3 * found + 2] = AT, at, at + 1
                found += 1
            else:
                escaped = i + (2 if code == _BACKSLASH else 3)
        elif kind & WORD and (not before & WORD or i == escaped):
            gram = (byte[i] * 961 + byte[i + 1] * 31 + byte[i + 2]) & ((1 << GRAM_BITS) - 1)
            if known[gram]:
                place[3 * found], place[3 * found + 1], place[3 * found + 2] = KEY, at, at + 1
                found += 1
        if not before & ALPHANUMERIC:
            if kind & UPPER:
                if kind_of[byte[i + 1]] & UPPER and kind_of[byte[i + 2]] & kind_of[byte[i + 3]] & DIGIT:
                    place[3 * found], place[3 * found + 1], place[3 * found + 2] = ACCOUNT, at, at + 1
                    found += 1
            elif (byte[i] == _TWO or byte[i] == _THREE) and byte[i + 4] == _COLON:
                place[3 * found], place[3 * found + 1], place[3 * found + 2] = ADDRESS, at, at + 1
                found += 1
        before = kind
        at += 1
    last = at
    if run >= 0:
        if digits >= FEWEST_DIGITS:
            place[3 * found], place[3 * found + 1], place[3 * found + 2] = NUMBER, run, last
            found += 1
        if dots >= DOTS and digits >= FEWEST_DOTTED:
            place[3 * found], place[3 * found + 1], place[3 * found + 2] = DOTTED, run, last
            found += 1
    return found
