"""Scanners: they find the ends of pre-tokens, for the patterns that have a compiled form.

A scanner is a C function (text, start, stop, limit, classes, ends, room) -> count. `text` is an address; `start`,
`stop` and `limit` are offsets into it: a pre-token begins at `start`, the text ends at `stop`, and bytes up to `limit`,
which is at least `stop`, may be read. It writes the ends of the pre-tokens from `start` on, in order, as int64 at the
address `ends`, until the text ends or about `room` are written, always fewer than `room + MARGIN`. `classes` is the
address of the table of character_classes.py. To continue, call it with the last end as `start`.

The text should be valid UTF-8; an invalid byte counts as a character of one byte and of no class. In the functions
below a scanner, `i` and the results are offsets too, and no byte at or after `stop` is read.

The plain twin of each is `PreTokenizer(name).split`.
"""

import numpy as np

from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import block_masks, load_i64, load_u8, set_bits, store_i64, trailing_zeros
from napkin.tokenizer.numba.character_classes import KIND, LETTER, LOWER, MARK, NUMBER, OTHER, SPACE, UPPER

# Entries of `ends` that may be written beyond `room`.
MARGIN = 80

LINE_FEED, CARRIAGE_RETURN, BLANK, APOSTROPHE, SLASH = 10, 13, 32, 39, 47
_NONE, _ONE, _ALL = np.uint64(0), np.uint64(1), np.uint64(2**64 - 1)
_LAST = np.uint64(63)
# The kind of the last byte of a block, for the next block.
_AFTER_LETTER, _AFTER_NUMBER, _AFTER_SYMBOL, _AFTER_BLANK, _AFTER_WHITE = (np.uint64(i) for i in range(5))


@CompiledFunction
def scan_whole(text, start, stop, limit, classes, ends, room):
    """The pattern that does not split text: the one pre-token is all that remains."""
    store_i64(ends, stop)
    return 1


@CompiledFunction
def scan_gpt4(text, start, stop, limit, classes, ends, room):
    """GPT-4's pattern in its first published form."""
    return _scan_gpt4(text, start, stop, classes, ends, room, False, 3)


@CompiledFunction
def scan_cl100k(text, start, stop, limit, classes, ends, room):
    """GPT-4's pattern in tiktoken's current form: white space at the end of a text is one pre-token."""
    return _scan_gpt4(text, start, stop, classes, ends, room, True, 3)


@CompiledFunction
def scan_qwen2(text, start, stop, limit, classes, ends, room):
    """Qwen 2's pattern: GPT-4's, with each digit alone."""
    return _scan_gpt4(text, start, stop, classes, ends, room, False, 1)


@CompiledFunction
def scan_o200k(text, start, stop, limit, classes, ends, room):
    """GPT-4o's pattern."""
    count = 0
    while start < stop and count < room:
        start = _o200k_end(text, start, stop, classes)
        store_i64(ends + 8 * count, start)
        count += 1
    return count


@CompiledFunction
def scan_gpt2(text, start, stop, limit, classes, ends, room):
    """GPT-2's pattern, 64 bytes at a time.

    A block becomes masks, one bit per byte: letters, numbers, white space, and the rest, called symbols. A pre-token
    starts where the kind changes, except after a space, which belongs to what follows it; a run of white space starts
    one where it begins, and one at its last character. That takes shifts and ands; only apostrophes are examined one by
    one. Non-ASCII characters are looked up and entered into the masks with all their bytes. Blocks with non-ASCII white
    space, whose last character is more than its last byte, and the end of the buffer are scanned character by character
    with `_gpt2_end`.
    """
    count = 0
    block = start
    carry, cleared, added = _NONE, _NONE, _NONE
    while block < stop and count < room:
        known, starts = False, _NONE
        # The byte after a block decides whether white space at its end is the last of a run.
        if block + 65 <= limit:
            known, starts, carry, cleared, added = _block_starts(text, block, stop, classes, carry, cleared, added)
        if known:
            if block == start:
                starts &= ~_ONE
            found = set_bits(starts)
            # Four at a time, the last of which may be invalid: fewer branches than one per pre-token.
            for k in range(count, count + found, 4):
                for m in range(k, k + 4):
                    store_i64(ends + 8 * m, block + trailing_zeros(starts))
                    starts &= starts - _ONE
            count += found
            block += 64
            if block >= stop:
                store_i64(ends + 8 * count, stop)
                count += 1
        else:
            if count:
                start = load_i64(ends + 8 * (count - 1))
            until = min(block + 64, stop)
            while start < until:
                start = _gpt2_end(text, start, stop, classes)
                store_i64(ends + 8 * count, start)
                count += 1
            block = start
            carry, cleared, added = _NONE, _NONE, _NONE
    return count


@jitted
def _block_starts(text, block, stop, classes, carry, cleared, added):
    """Find the bytes among the 64 at `block` that start a pre-token.

    `carry` holds a bit for the kind of the byte before the block; `cleared` and `added` are starts that a contraction
    at the end of the previous block removes and adds. Returns whether the masks suffice, the starts, and these three
    for the next block.
    """
    letters, numbers, blanks, white, apostrophes, beyond = block_masks(text + block)
    left = stop - block
    valid = _ALL if left >= 64 else (_ONE << np.uint64(left)) - _ONE
    known = True
    if beyond & valid:
        letters, numbers, known = _add_non_ascii(text, block, stop, classes, carry, letters, numbers, beyond & valid)
    letters &= valid
    numbers &= valid
    white &= valid
    symbols = ~(letters | numbers | white) & valid
    if left <= 64:
        white_follows = _ONE << np.uint64(left - 1)
    else:
        white_follows = _NONE
        value, _ = class_and_width(text, block + 64, stop, classes)
        if value & KIND == SPACE:
            white_follows = _ONE << _LAST
            known &= load_u8(text + block + 64) < 0x80
    continues = (letters & _after(letters, carry, _AFTER_LETTER)) | (numbers & _after(numbers, carry, _AFTER_NUMBER))
    continues |= (symbols & _after(symbols, carry, _AFTER_SYMBOL)) | _after(blanks, carry, _AFTER_BLANK)
    starts = (valid & ~white & ~continues) | (white & ~_after(white, carry, _AFTER_WHITE))
    starts |= white & ~((white >> _ONE) | white_follows)
    starts = (starts & ~cleared) | (added & valid)
    starts, cleared, added = _split_contractions(text, block, stop, starts, apostrophes & starts)
    carry = (letters >> _LAST) << _AFTER_LETTER
    carry |= ((numbers >> _LAST) << _AFTER_NUMBER) | ((symbols >> _LAST) << _AFTER_SYMBOL)
    carry |= ((blanks >> _LAST) << _AFTER_BLANK) | ((white >> _LAST) << _AFTER_WHITE)
    return known, starts, carry, cleared, added


@jitted
def _after(mask, carry, bit):
    """The mask in which bit i is set if byte i - 1 is in `mask`."""
    return (mask << _ONE) | ((carry >> bit) & _ONE)


@jitted
def _add_non_ascii(text, block, stop, classes, carry, letters, numbers, beyond):
    """Enter non-ASCII characters into the masks; also returns whether none of them is white space."""
    known = True
    # The rest of a character that began in the previous block is of the same kind as its first byte.
    begun = trailing_zeros(~beyond)
    head = _NONE
    for i in range(min(begun, 3)):
        if load_u8(text + block + i) >= 0xC0:
            break
        head |= _ONE << np.uint64(i)
    if carry >> _AFTER_LETTER & _ONE:
        letters |= head
    elif carry >> _AFTER_NUMBER & _ONE:
        numbers |= head
    beyond &= ~head
    while beyond:
        i = trailing_zeros(beyond)
        value, width = class_and_width(text, block + i, stop, classes)
        bits = ((_ONE << np.uint64(width)) - _ONE) << np.uint64(i)
        kind = value & KIND
        if kind == LETTER:
            letters |= bits
        elif kind == NUMBER:
            numbers |= bits
        elif kind == SPACE:
            known = False
        beyond &= ~bits
    return letters, numbers, known


@jitted
def _split_contractions(text, block, stop, starts, apostrophes):
    """Split off 's, 'll and the other contractions whose apostrophe starts a pre-token."""
    cleared, added = _NONE, _NONE
    while apostrophes:
        i = trailing_zeros(apostrophes)
        apostrophes &= apostrophes - _ONE
        end = contraction_end(text, block + i, stop, False) - block
        if end <= i:
            continue
        if i + 1 < 64:
            starts &= ~(_ONE << np.uint64(i + 1))
        else:
            cleared |= _ONE
        # Nothing starts at the end of the text.
        if block + end < stop:
            if end < 64:
                starts |= _ONE << np.uint64(end)
            else:
                added |= _ONE << np.uint64(end - 64)
    return starts, cleared, added


@jitted
def _gpt2_end(text, i, stop, classes):
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
def _scan_gpt4(text, start, stop, classes, ends, room, tail, digits):
    """Scan by GPT-4's pattern, with `tail` in tiktoken's current form; a number has at most so many digits."""
    count = 0
    while start < stop and count < room:
        start = _gpt4_end(text, start, stop, classes, tail, digits)
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
