"""Decoding UTF-8 characters, and finding the end of the runs of characters that patterns consist of.

`text` and `classes` are addresses: of the text's first byte, and of the table of character_classes.py. `i`, `stop` and
the results are offsets into the text; no byte at or after `stop` is read. The text should be valid UTF-8; an invalid
byte counts as a character of one byte and of no class.
"""

from napkin.machine_code.compiled_function import jitted
from napkin.machine_code.pointers import load_u8
from napkin.tokenizer.numba.character_classes import KIND, SPACE

LINE_FEED, CARRIAGE_RETURN, BLANK, APOSTROPHE, SLASH = 10, 13, 32, 39, 47


@jitted
def class_and_width(text, i, stop, classes):
    """The class of the character at `i`, which must be before `stop`, and its length in bytes."""
    byte = load_u8(text + i)
    if byte < 0x80:
        return load_u8(classes + byte), 1
    if byte < 0xE0:
        if i + 1 < stop:
            return load_u8(classes + (((byte & 0x1F) << 6) | _low_bits(text, i + 1))), 2
    elif byte < 0xF0:
        if i + 2 < stop:
            code = ((byte & 0x0F) << 12) | (_low_bits(text, i + 1) << 6) | _low_bits(text, i + 2)
            return load_u8(classes + code), 3
    elif i + 3 < stop:
        code = ((byte & 7) << 18) | (_low_bits(text, i + 1) << 12) | (_low_bits(text, i + 2) << 6)
        code |= _low_bits(text, i + 3)
        if code < 0x110000:
            return load_u8(classes + code), 4
    return 0, 1


@jitted
def kind_at(text, i, stop, classes):
    """The kind of the character at `i`; -1 at the end of the text."""
    if i >= stop:
        return -1
    value, _ = class_and_width(text, i, stop, classes)
    return value & KIND


@jitted
def run_end(text, i, stop, classes, kind):
    """The end of the run of characters of one kind that begins at `i`; `i` if there is none."""
    while i < stop:
        width = _width_of_kind(text, i, stop, classes, kind)
        if width == 0:
            break
        i += width
    return i


@jitted
def at_most(longest, text, i, stop, classes, kind):
    """The end of the run of at most `longest` characters of one kind that begins at `i`."""
    for _ in range(longest):
        if i < stop:
            i += _width_of_kind(text, i, stop, classes, kind)
    return i


@jitted
def _width_of_kind(text, i, stop, classes, kind):
    """The length in bytes of the character at `i`; 0 if it is of another kind."""
    value, width = class_and_width(text, i, stop, classes)
    return width if value & KIND == kind else 0


@jitted
def is_line_end(byte):
    return byte in (LINE_FEED, CARRIAGE_RETURN)


@jitted
def white_space_end(text, i, stop, classes, lines, tail):
    r"""The end of the pre-token that begins with the white space at `i`.

    It matches `\s+(?!\S)|\s`, with `lines` preceded by `\s*[\r\n]`, and with `tail` preceded by `\s++$`.
    """
    end, last, line = i, i, 0
    while end < stop:
        value, width = class_and_width(text, end, stop, classes)
        if value & KIND != SPACE:
            break
        last = end
        end += width
        if is_line_end(load_u8(text + last)):
            line = end
    if tail and end == stop:
        return end
    if lines and line:
        return line
    if end < stop and last > i:
        return last
    return end


@jitted
def contraction_end(text, i, stop, any_case):
    """The end of the English contraction whose apostrophe is at `i`; 0 if there is none.

    With `any_case` letters may be capitals, and the s may be U+017F, the long s, whose capital is S.
    """
    if i + 1 >= stop:
        return 0
    first = load_u8(text + i + 1)
    second = load_u8(text + i + 2) if i + 2 < stop else 0
    if any_case:
        if first == 0xC5 and second == 0xBF:
            return i + 3
        first |= 0x20
        second |= 0x20
    if first in (100, 109, 115, 116):  # d m s t
        return i + 2
    # ll, re, ve
    if (first == 108 and second == 108) or (first in (114, 118) and second == 101):
        return i + 3
    return 0


@jitted
def _low_bits(text, i):
    return load_u8(text + i) & 0x3F
