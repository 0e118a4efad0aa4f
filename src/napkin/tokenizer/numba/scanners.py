"""Scanners: they find the ends of pre-tokens, for the patterns that have a compiled form.

A scanner is a C function (text, start, stop, limit, classes, ends, room) -> count. `text` is an address; `start`,
`stop` and `limit` are offsets into it: a pre-token begins at `start`, the text ends at `stop`, and bytes up to `limit`,
which is at least `stop`, may be read. It writes the ends of the pre-tokens from `start` on, in order, as int64 at the
address `ends`, until the text ends or about `room` are written, always fewer than `room + MARGIN`. `classes` is the
address of the table of character_classes.py. To continue, call it with the last end as `start`.

The plain twin of each is `PreTokenizer(name).split`.
"""

from napkin.machine_code.compiled_function import jitted
from napkin.machine_code.pointers import load_u8, store_i64
from napkin.tokenizer.numba.character_classes import KIND, LETTER, LOWER, MARK, NUMBER, OTHER, SPACE, UPPER
from napkin.tokenizer.numba.character_runs import (
    APOSTROPHE,
    BLANK,
    SLASH,
    at_most,
    class_and_width,
    contraction_end,
    is_line_end,
    kind_at,
    run_end,
    white_space_end,
)

# Entries of `ends` that may be written beyond `room`.
MARGIN = 80


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
def scan_gpt4(text, start, stop, classes, ends, room, tail, digits):
    """Scan by GPT-4's pattern, with `tail` in tiktoken's current form; a number has at most so many digits."""
    count = 0
    while start < stop and count < room:
        start = _gpt4_end(text, start, stop, classes, tail, digits)
        store_i64(ends + 8 * count, start)
        count += 1
    return count


@jitted
def scan_o200k(text, start, stop, classes, ends, room):
    """Scan by the pattern of o200k."""
    count = 0
    while start < stop and count < room:
        start = _o200k_end(text, start, stop, classes)
        store_i64(ends + 8 * count, start)
        count += 1
    return count


@jitted
def _gpt4_end(text, i, stop, classes, tail, digits):
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
def _o200k_end(text, i, stop, classes):
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
