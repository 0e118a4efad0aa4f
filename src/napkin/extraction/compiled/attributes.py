"""The evidence of an element's attributes: the words in its names, and whether it is hidden."""

from napkin.extraction.compiled.markup import find, hash_attribute, is_space
from napkin.extraction.tags import BIT, name_hash
from napkin.machine_code.compiled_function import jitted
from napkin.machine_code.pointers import i64_at, load_u8, load_u32

_CLASS, _ID, _ROLE, _ITEMPROP, _STYLE, _HIDDEN = (
    name_hash(name) for name in (b"class", b"id", b"role", b"itemprop", b"style", b"hidden")
)
HIDDEN_BIT = 1 << BIT["hidden"]
_GT, _SLASH, _QUOTE, _EQUALS, _HYPHEN = (ord(c) for c in '>/"=-')


@jitted
def read_attributes(page, i, n, automaton, found):
    """The evidence of the attributes from i on, and where the tag ends."""
    evidence = 0
    while i < n:
        c = load_u8(page + i)
        if c == _GT:
            return evidence, i + 1
        if is_space(c) or c in (_SLASH, _EQUALS):
            i += 1
            continue
        key, i = hash_attribute(page, i, n)
        begin = end = i
        if i + 1 < n and load_u8(page + i) == _EQUALS and load_u8(page + i + 1) == _QUOTE:
            begin = i + 2
            end = find(page, begin, n, _QUOTE)
            i = end + 1
        if key == _HIDDEN:
            evidence |= HIDDEN_BIT
        elif key == _STYLE:
            if _says_hidden(page, begin, end):
                evidence |= HIDDEN_BIT
        elif key in (_CLASS, _ID, _ROLE, _ITEMPROP):
            evidence |= _search(page, begin, end, automaton, found)
    return evidence, n


@jitted
def _search(page, begin, end, automaton, found):
    """The evidence in the words of bytes begin to end."""
    masks = i64_at(found)
    evidence, lower = 0, False
    # As if a hyphen stood before and after.
    at = load_u32(automaton)
    for i in range(begin, end + 1):
        c = load_u8(page + i) if i < end else _HYPHEN
        letter = 0
        if 97 <= c <= 122:
            letter = c - 96
        elif 65 <= c <= 90:
            letter = c - 64
            if lower:
                at = load_u32(automaton + 4 * 27 * at)
                evidence |= masks[at]
        lower = 97 <= c <= 122
        at = load_u32(automaton + 4 * (27 * at + letter))
        evidence |= masks[at]
    return evidence


@jitted
def _says_hidden(page, begin, end):
    """True for a style that says display:none or visibility:hidden, with or without a space."""
    for i in range(begin, end - 7):
        # "none" and "hidd", after a colon or a space, in a style where "disp" or "visi" came before.
        word = load_u32(page + i)
        if word == 0x70736964 or word == 0x69736976:
            j = find(page, i, end, 58) + 1
            while j < end and is_space(load_u8(page + j)):
                j += 1
            if j + 4 <= end:
                value = load_u32(page + j)
                if (word == 0x70736964 and value == 0x656E6F6E) or (word == 0x69736976 and value == 0x64646968):
                    return True
    return False
