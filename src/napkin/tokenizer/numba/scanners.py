"""Scanners: they find the ends of pre-tokens, for the patterns that have a compiled form.

A scanner is a C function (text, start, stop, limit, classes, ends, room) -> count. `text` is an address; `start`,
`stop` and `limit` are offsets into it: a pre-token begins at `start`, the text ends at `stop`, and bytes up to `limit`,
which is at least `stop`, may be read. It writes the ends of the pre-tokens from `start` on, in order, as int64 at the
address `ends`, until the text ends or about `room` are written, always fewer than `room + MARGIN`. `classes` is the
address of the table of character_classes.py. To continue, call it with the last end as `start`.

The text should be valid UTF-8; an invalid byte counts as a character of one byte and of no class. What the masks of a
block cannot tell is found character by character, in pre_token_end.py.

The plain twin of each is `PreTokenizer(name).split`.
"""

import numpy as np

from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import (
    block_masks,
    leading_zeros,
    load_i64,
    load_u8,
    set_bits,
    store_i64,
    trailing_zeros,
)
from napkin.tokenizer.numba.character_classes import KIND, LETTER, LOWER, MARK, NUMBER, OTHER, SPACE, UPPER
from napkin.tokenizer.numba.pre_token_end import class_and_width, contraction_end, gpt2_end, gpt4_end, o200k_end

# Entries of `ends` that may be written beyond `room`.
MARGIN = 80

_NONE, _ONE, _ALL = np.uint64(0), np.uint64(1), np.uint64(2**64 - 1)
_TWO, _THREE, _LAST = np.uint64(2), np.uint64(3), np.uint64(63)
# The bytes of a block but for the first, where the block's own pre-token starts, and the last three.
_SURE = np.uint64(2**61 - 2)
# The kind of the last byte of a block, for the next block.
_AFTER_LETTER, _AFTER_NUMBER, _AFTER_SYMBOL, _AFTER_BLANK, _AFTER_WHITE = (np.uint64(i) for i in range(5))


@CompiledFunction
def scan_whole(text, start, stop, limit, classes, ends, room):
    """The pattern that does not split text: the one pre-token is all that remains."""
    store_i64(ends, stop)
    return 1


@CompiledFunction
def scan_gpt2(text, start, stop, limit, classes, ends, room):
    """GPT-2's pattern, 64 bytes at a time.

    A block becomes masks, one bit per byte: letters, numbers, white space, and the rest, called symbols. A pre-token
    starts where the kind changes, except after a space, which belongs to what follows it; a run of white space starts
    one where it begins, and one at its last character. That takes shifts and ands; only apostrophes are examined one by
    one. Non-ASCII characters are looked up and entered into the masks with all their bytes. Blocks with non-ASCII white
    space, whose last character is more than its last byte, and the end of the buffer are scanned character by character
    with `gpt2_end`.
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
                start = gpt2_end(text, start, stop, classes)
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
    letters, numbers, blanks, white, apostrophes, beyond, _, _, _ = block_masks(text + block)
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
    count, slow = 0, start
    while start < stop and count < room:
        starts = _NONE
        if start >= slow and start + 64 <= stop:
            starts, examined = _gpt4_starts(text, start, stop, classes, 3, True)
            slow = start + examined
        if starts:
            count, start = _store_starts(starts, start, ends, count)
        else:
            start = o200k_end(text, start, stop, classes)
            store_i64(ends + 8 * count, start)
            count += 1
    return count


@jitted
def _scan_gpt4(text, start, stop, classes, ends, room, tail, digits):
    """Scan by GPT-4's pattern, with `tail` in tiktoken's current form; a number has at most so many digits.

    A block of 64 bytes begins where a pre-token does: what precedes it does not matter. The next one begins at the last
    pre-token that is sure to start in it. Where there is none, one is found character by character.
    """
    count, slow = 0, start
    while start < stop and count < room:
        starts = _NONE
        if start >= slow and start + 64 <= stop:
            starts, examined = _gpt4_starts(text, start, stop, classes, digits, False)
            slow = start + examined
        if starts:
            count, start = _store_starts(starts, start, ends, count)
        else:
            start = gpt4_end(text, start, stop, classes, tail, digits)
            store_i64(ends + 8 * count, start)
            count += 1
    return count


@jitted
def _store_starts(starts, block, ends, count):
    """Store the starts in a block as ends; returns the number of ends, and the last one."""
    last = block + 63 - leading_zeros(starts)
    found = set_bits(starts)
    # Four at a time, the last of which may be invalid: fewer branches than one per pre-token.
    for k in range(count, count + found, 4):
        for m in range(k, k + 4):
            store_i64(ends + 8 * m, block + trailing_zeros(starts))
            starts &= starts - _ONE
    return count + found, last


@jitted
def _gpt4_starts(text, block, stop, classes, digits, cased):
    """Find the bytes among the 64 at `block`, where a pre-token starts, at which others start, whatever comes after.

    By GPT-4's pattern with numbers of `digits`, 1 or 3, or, `cased`, by GPT-4o's. Returns the starts and 0; or, where a
    character is beyond the masks (a number or white space that is not ASCII, a mark of GPT-4o's), none and the number
    of bytes up to and including its first.
    """
    letters, numbers, blanks, white, apostrophes, beyond, line_ends, slashes, capitals = block_masks(text + block)
    inside, caseless = _NONE, _NONE
    if beyond:
        more, capital, caseless, inside, examined = _non_ascii_letters(text, block, stop, classes, beyond, cased)
        letters |= more
        capitals |= capital
        clash = capitals & (caseless << _ONE)
        if examined or (cased and clash):
            return _NONE, examined or trailing_zeros(clash) + 1
    symbols = ~(letters | numbers | white)
    # Line ends, and slashes of GPT-4o's, that belong to the symbols before them: an addition carries through a run.
    joined = line_ends & (symbols << _ONE)
    may_join = line_ends | slashes if cased else line_ends
    joined |= may_join & ~(may_join + joined)
    symbols &= ~joined
    trailing_white = white >> _LAST
    uncertain = 64 - leading_zeros(~white)
    white &= ~joined
    line_ends &= white
    spaces = white & ~line_ends
    # A run of white space is a pre-token up to its last line end, and again up to its last character, which belongs to
    # what follows it if that may begin with it.
    after_line = spaces & (line_ends << _ONE)
    ended = line_ends & (spaces << _ONE)
    while ended:
        before = (ended & (~ended + _ONE)) - _ONE
        ended &= ended - _ONE
        after_line &= ~(_ONE << np.uint64(64 - leading_zeros(~spaces & before)))
    starts = (white & ~(white << _ONE)) | after_line | (spaces & ~(white >> _ONE))
    alone = symbols & ~((symbols | blanks) << _ONE)
    starts |= alone
    # A symbol that starts a pre-token and is followed by a letter is one with the word, as is a space.
    after_symbol = ((alone << _ONE) + inside) & ~inside
    starts |= letters & ~((letters | spaces) << _ONE) & ~after_symbol
    if digits == 1:
        starts |= numbers
    else:
        first, three = numbers & ~(numbers << _ONE), numbers & (numbers << _ONE) & (numbers << _TWO)
        while first:
            starts |= first
            first = (first << _THREE) & three
    if cased:
        starts |= capitals & ((letters & ~capitals) << _ONE)
        starts = _join_contractions(text, block, stop, starts, apostrophes & (letters << _ONE))
    else:
        starts = _split_at_contractions(text, block, stop, starts, apostrophes & alone)
    # The last three bytes may be a part of a contraction or of a character.
    sure = _SURE
    if trailing_white:
        sure &= (_TWO << np.uint64(uncertain)) - _ONE
    return starts & sure, 0


@jitted
def _non_ascii_letters(text, block, stop, classes, beyond, cased):
    """Find the non-ASCII letters, those of them that are capitals and that have no case, and all bytes but the first
    of each character. Returns as well up to where there was a character that is neither a letter nor a symbol; else 0.
    """
    letters, capitals, caseless, inside = _NONE, _NONE, _NONE, _NONE
    while beyond:
        i = trailing_zeros(beyond)
        value, width = class_and_width(text, block + i, stop, classes)
        first = _ONE << np.uint64(i)
        bits = (first << np.uint64(width)) - first
        if value & KIND == LETTER:
            letters |= bits
            if value & UPPER:
                capitals |= bits
            elif not value & LOWER:
                caseless |= bits
        elif value & KIND != OTHER or (cased and value & MARK):
            return letters, capitals, caseless, inside, i + 1
        inside |= bits & ~first
        beyond &= ~bits
    return letters, capitals, caseless, inside, 0


@jitted
def _split_at_contractions(text, block, stop, starts, apostrophes):
    """Let a pre-token start after each contraction whose apostrophe starts one."""
    while apostrophes:
        i = trailing_zeros(apostrophes)
        apostrophes &= apostrophes - _ONE
        end = contraction_end(text, block + i, stop, True) - block
        if i < end < 64:
            starts |= _ONE << np.uint64(end)
    return starts


@jitted
def _join_contractions(text, block, stop, starts, apostrophes):
    """Let no pre-token start in a contraction whose apostrophe follows a word, which it belongs to, but one after it.

    What follows a contraction is not a word that another may belong to.
    """
    last = -1
    while apostrophes:
        i = trailing_zeros(apostrophes)
        apostrophes &= apostrophes - _ONE
        end = contraction_end(text, block + i, stop, True) - block
        if i < end < 64 and i != last:
            starts &= ~((_ONE << np.uint64(end)) - (_ONE << np.uint64(i)))
            starts |= _ONE << np.uint64(end)
            last = end
    return starts
