"""Characters of UTF-8 text at an address, and the runs of them that all patterns are made of.

`text` and `classes` are addresses: of the text's first byte and of the table of character_classes.py. `i`, `stop` and
what is returned are offsets into the text; no byte at or beyond `stop` is read. The text is meant to be valid UTF-8;
bytes that are not are characters of one byte and no class.
"""

from napkin.tokenizer.compiled.character_classes import KIND, SPACE
from napkin.tokenizer.compiled.intrinsics import load_u8
from napkin.tokenizer.compiled.machine_code import part

LINE_FEED, CARRIAGE_RETURN, BLANK, APOSTROPHE, SLASH = 10, 13, 32, 39, 47


@part
def class_and_width(text, i, stop, classes):
    """Class of the character at `i`, which is before `stop`, and the bytes it takes."""
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


@part
def kind_at(text, i, stop, classes):
    """Kind of the character at `i`; -1 at the end."""
    if i >= stop:
        return -1
    value, _ = class_and_width(text, i, stop, classes)
    return value & KIND


@part
def run_end(text, i, stop, classes, kind):
    """Where the characters of one kind end that begin at `i`; `i` itself where there is none."""
    while i < stop:
        value, width = class_and_width(text, i, stop, classes)
        if value & KIND != kind:
            break
        i += width
    return i


@part
def at_most_three(text, i, stop, classes, kind):
    """The same for at most three characters."""
    for _ in range(3):
        if i >= stop:
            break
        value, width = class_and_width(text, i, stop, classes)
        if value & KIND != kind:
            break
        i += width
    return i


@part
def is_line_end(byte):
    """Whether a byte is a line feed or a carriage return."""
    return byte in (LINE_FEED, CARRIAGE_RETURN)


@part
def white_space_end(text, i, stop, classes, lines, tail):
    r"""Where the pre-token ends that begins with the white space at `i`.

    `\s+(?!\S)|\s`; with `lines` after `\s*[\r\n]`, and with `tail` after `\s++$`.
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


@part
def contraction_end(text, i, stop, any_case):
    """Where the English contraction ends whose apostrophe is at `i`; 0 where there is none.

    In any case the s may be U+017F, the long s, whose capital is S.
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


@part
def _low_bits(text, i):
    return load_u8(text + i) & 0x3F
