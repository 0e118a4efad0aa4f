"""The text of a page, character by character: white space becomes one space, and what the scores need is counted."""

from napkin.extraction.compiled import fields as f
from napkin.extraction.compiled.markup import NBSP, is_space
from napkin.machine_code.compiled_function import jitted
from napkin.machine_code.pointers import load_u8, load_u32, store_u8

_AMPERSAND = ord("&")
_SPACE = ord(" ")
# "amp;", "lt;" and "gt;" as the first bytes after the ampersand.
_AMP, _LT, _GT = 0x3B706D61, 0x3B746C, 0x3B7467


@jitted
def read_text(page, i, end, text, n_text, blocks, block, spaced, links, bold, marked):
    """Append bytes i to end, without markup, to the text of a block; new length, whether a space comes next.

    `spaced` says whether one stands before; `marked` whether code begins with the first character.
    """
    characters, words, marks, digits, capitals = 0, 0, 0, 0, 0
    started = blocks[block + f.CHARACTERS] > 0
    in_word = started and not spaced
    last = blocks[block + f.IS_SENTENCE]
    while i < end:
        c, width = decoded_byte(page, i, end)
        if is_space(c):
            spaced, in_word = True, False
            i += width
            continue
        if c >= 0xC0:
            width = min(2 if c < 0xE0 else (3 if c < 0xF0 else 4), end - i)
        if c < 32 or is_invisible(page, i, width, c):
            i += width
            continue
        if spaced and (started or characters > 0):
            store_u8(text + n_text, _SPACE)
            n_text += 1
            characters += 1
        spaced = False
        if marked:
            store_u8(text + n_text, f.CODE_MARK)
            n_text += 1
            marked = False
        mark = 0
        if c < 0x80:
            store_u8(text + n_text, c)
            n_text += 1
            characters += 1
            if 48 <= c <= 57:
                digits += 1
            elif c == 46 or c == 33 or c == 63:
                mark = 2
            elif c == 44 or c == 59:
                mark = 1
        else:
            for k in range(width):
                store_u8(text + n_text + k, load_u8(page + i + k))
            n_text += width
            # A character of Chinese, Japanese or Korean says as much as three letters.
            characters += 3 if 0xE3 <= c <= 0xED else 1
            mark = wide_mark(page, i, width, c)
        if mark:
            marks += 1
        if not in_word:
            words += 1
            in_word = True
            if 65 <= c <= 90:
                capitals += 1
        # Closing quotation marks and brackets may follow the mark that ends a sentence.
        closes = c == 34 or c == 39 or c == 41 or c == 93 or c == 0xC2 or (c == 0xE2 and load_u8(page + i + 1) == 0x80)
        if mark == 2:
            last = 1
        elif not closes:
            last = 0
        i += width
    blocks[block + f.CHARACTERS] += characters
    blocks[block + f.WORDS] += words
    blocks[block + f.MARKS] += marks
    blocks[block + f.DIGITS] += digits
    blocks[block + f.CAPITALS] += capitals
    blocks[block + f.IS_SENTENCE] = last
    if links > 0:
        blocks[block + f.LINKED] += characters
        blocks[block + f.LINKS] = max(blocks[block + f.LINKS], 1)
    if bold > 0:
        blocks[block + f.BOLD] += characters
    return n_text, spaced


@jitted
def copy_code(page, i, end, text, n_text, blocks, block):
    """Append bytes i to end to the text of a block with all their white space; the new length."""
    begin = n_text
    while i < end:
        c, width = decoded_byte(page, i, end)
        if c >= 32 or is_space(c):
            store_u8(text + n_text, c)
            n_text += 1
        i += width
    blocks[block + f.CHARACTERS] += n_text - begin
    blocks[block + f.WORDS] += 1
    return n_text


@jitted
def decoded_byte(page, i, end):
    """The byte at i, or the one that a character reference stands for, and the number of source bytes."""
    c, width = load_u8(page + i), 1
    if c == _AMPERSAND and i + 3 < end:
        after = load_u32(page + i + 1)
        if after & 0xFFFFFF == _LT:
            c, width = 60, 4
        elif after & 0xFFFFFF == _GT:
            c, width = 62, 4
        elif i + 4 < end and after == _AMP:
            width = 5
        elif i + 5 < end and after == NBSP:
            c, width = _SPACE, 6
    return c, width


@jitted
def is_invisible(page, i, width, c):
    """True for a zero-width space, a soft hyphen or a byte order mark."""
    if width == 2:
        return c == 0xC2 and load_u8(page + i + 1) == 0xAD
    if width == 3:
        second, third = load_u8(page + i + 1), load_u8(page + i + 2)
        zero_width = c == 0xE2 and ((second == 0x80 and third == 0x8B) or (second == 0x81 and third == 0xA0))
        return zero_width or (c == 0xEF and second == 0xBB and third == 0xBF)
    return False


@jitted
def wide_mark(page, i, width, c):
    """2 for a character beyond ASCII that ends a sentence, 1 for a comma, 0 for any other."""
    mark = 0
    if width == 3:
        second, third = load_u8(page + i + 1), load_u8(page + i + 2)
        if c == 0xE3 and second == 0x80:
            mark = 1 if third == 0x81 else (2 if third == 0x82 else 0)
        elif c == 0xEF and second == 0xBC:
            mark = 2 if third == 0x81 or third == 0x9F else (1 if third == 0x8C or third == 0x9B else 0)
        elif c == 0xE0 and second == 0xA5:
            mark = 2 if third == 0xA4 else 0
    elif width == 2:
        second = load_u8(page + i + 1)
        if c == 0xD8:
            mark = 1 if second == 0x8C else (2 if second == 0x9F else 0)
        elif c == 0xDB:
            mark = 2 if second == 0x94 else 0
    return mark
