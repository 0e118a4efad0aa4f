"""GPT-2's pattern, 64 bytes at a time.

A block becomes masks, one bit per byte: letters, numbers, white space, and the rest, called symbols. A pre-token starts
where the kind changes, except after a space, which belongs to what follows it; a run of white space starts one where it
begins, and one at its last character. That takes shifts and ands; only apostrophes are examined one by one. Non-ASCII
characters are looked up and entered into the masks with all their bytes. Blocks with non-ASCII white space, whose last
character is more than its last byte, and the end of the buffer are scanned character by character with `gpt2_end`.
"""

import numpy as np

from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import block_masks, load_i64, load_u8, set_bits, store_i64, trailing_zeros
from napkin.tokenizer.numba.character_classes import KIND, LETTER, NUMBER, SPACE
from napkin.tokenizer.numba.character_runs import class_and_width, contraction_end
from napkin.tokenizer.numba.scanners import gpt2_end

_NONE, _ONE, _ALL = np.uint64(0), np.uint64(1), np.uint64(2**64 - 1)
_LAST = np.uint64(63)
# The kind of the last byte of a block, for the next block.
_AFTER_LETTER, _AFTER_NUMBER, _AFTER_SYMBOL, _AFTER_BLANK, _AFTER_WHITE = (np.uint64(i) for i in range(5))


@CompiledFunction
def scan_gpt2(text, start, stop, limit, classes, ends, room):
    """The scanner of GPT-2's pattern."""
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
