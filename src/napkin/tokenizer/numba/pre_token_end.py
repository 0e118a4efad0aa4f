"""The end of one pre-token, character by character, for the patterns that have a scanner.

`i` and the results are offsets into `text`, an address; no byte at or after `stop` is read. `classes` is the address of
the table of character_classes.py. An invalid byte counts as a character of one byte and of no class.
"""

from napkin.machine_code.compiled_function import jitted
from napkin.machine_code.pointers import load_u8
from napkin.tokenizer.numba.character_classes import KIND, LETTER, LOWER, MARK, NUMBER, OTHER, SPACE, UPPER

LINE_FEED, CARRIAGE_RETURN, BLANK, APOSTROPHE, SLASH = 10, 13, 32, 39, 47


@jitted
def gpt2_end(text, i, stop, classes):
    """The end of the pre-token that begins at `i`, by GPT-2's pattern."""
    byte = load_u8(text + i)
    if byte == APOSTROPHE:
        end = contraction_end(text, i, stop, False)
        if end:
            return end
    kind = kind_at(text, i, stop, classes)
    start = i
    if byte == BLANK:
        following = kind_at(text, i + 1, stop, classes)
        if following >= 0 and following != SPACE:
            kind, start = following, i + 1
    if kind == SPACE:
        return white_space_end(text, i, stop, classes, False, False)
    return run_end(text, start, stop, classes, kind)


@jitted
def gpt4_end(text, i, stop, classes, tail, digits):
    byte = load_u8(text + i)
    if byte == APOSTROPHE:
        end = contraction_end(text, i, stop, True)
        if end:
            return end
    value, width = class_and_width(text, i, stop, classes)
    kind = value & KIND
    following = i + width
    if kind == LETTER:
        return run_end(text, following, stop, classes, LETTER)
    if kind == NUMBER:
        return at_most(digits, text, i, stop, classes, NUMBER)
    next_kind = kind_at(text, following, stop, classes)
    if next_kind == LETTER and not is_line_end(byte):
        return run_end(text, following, stop, classes, LETTER)
    if kind == OTHER or (byte == BLANK and next_kind == OTHER):
        end = run_end(text, following, stop, classes, OTHER)
        while end < stop and is_line_end(load_u8(text + end)):
            end += 1
        return end
    return white_space_end(text, i, stop, classes, True, tail)


@jitted
def o200k_end(text, i, stop, classes):
    byte = load_u8(text + i)
    value, width = class_and_width(text, i, stop, classes)
    kind = value & KIND
    following = i + width
    if kind == NUMBER:
        return at_most(3, text, i, stop, classes, NUMBER)
    end = 0
    if kind != LETTER and not is_line_end(byte):
        end = _word_with_lower_case(text, following, stop, classes)
    if not end and (kind == LETTER or value & MARK):
        end = _word_with_lower_case(text, i, stop, classes)
    if not end and kind != LETTER and not is_line_end(byte):
        end = _capitals(text, following, stop, classes)
    if not end and kind == LETTER:
        end = _capitals(text, i, stop, classes)
    if end:
        if end < stop and load_u8(text + end) == APOSTROPHE:
            return max(end, contraction_end(text, end, stop, True))
        return end
    if kind == OTHER or (byte == BLANK and kind_at(text, following, stop, classes) == OTHER):
        end = run_end(text, following, stop, classes, OTHER)
        while end < stop and (is_line_end(load_u8(text + end)) or load_u8(text + end) == SLASH):
            end += 1
        return end
    return white_space_end(text, i, stop, classes, True, False)


@jitted
def _word_with_lower_case(text, i, stop, classes):
    r"""The end of `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+`; 0 if it does not match at `i`.

    The first part matches greedily. If a lower-case letter follows, the second part continues there; if not, the first
    part backtracks to the last character that the second may begin with.
    """
    backtracked = 0
    while i < stop:
        value, width = class_and_width(text, i, stop, classes)
        if value & LOWER or not (value & KIND == LETTER or value & MARK):
            break
        i += width
        if not value & UPPER:
            backtracked = i
    end = i
    while end < stop:
        value, width = class_and_width(text, end, stop, classes)
        if value & UPPER or not (value & KIND == LETTER or value & MARK):
            break
        end += width
    return end if end > i else backtracked


@jitted
def _capitals(text, i, stop, classes):
    r"""The end of `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+` if no lower-case letter follows; 0 if it does not match."""
    end = i
    while end < stop:
        value, width = class_and_width(text, end, stop, classes)
        if not value & UPPER:
            break
        end += width
    return end if end > i else 0


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
