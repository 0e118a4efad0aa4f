"""Moving over the markup of a serialized page: where tags, comments and elements end, and the hashes of names; and the
evidence of an element's attributes: the words in its names, and whether it is hidden."""

from napkin.extraction.tags import BIT, N_SLOTS, RAW, name_hash
from napkin.machine_code.compiled_function import jitted
from napkin.machine_code.pointers import i64_at, load_u8, load_u32

_LT, _GT, _SLASH, _BANG, _QUOTE, _EQUALS, _AMPERSAND, _HYPHEN = (ord(c) for c in '<>/!"=&-')
NBSP = 0x7073626E
"""The letters of a reference to a no-break space, as four bytes."""
_CLASS, _ID, _ROLE, _ITEMPROP, _STYLE, _HIDDEN = (
    name_hash(name) for name in (b"class", b"id", b"role", b"itemprop", b"style", b"hidden")
)
HIDDEN_BIT = 1 << BIT["hidden"]


@jitted
def skip_attributes(page, i, n):
    """The end of the tag whose attributes begin at i."""
    quoted = False
    while i < n:
        c = load_u8(page + i)
        i += 1
        if c == _QUOTE:
            quoted = not quoted
        elif c == _GT and not quoted:
            return i
    return n


@jitted
def skip_raw(page, i, n, key):
    """The end of an element whose content, which begins at i, is not markup."""
    while i < n:
        i = find(page, i, n, _LT)
        if i + 1 < n and load_u8(page + i + 1) == _SLASH:
            found, after = hash_name(page, i + 2, n)
            if found == key:
                return min(find(page, after, n, _GT) + 1, n)
        i += 1
    return n


@jitted
def skip_element(page, i, n, key, tags):
    """The end of an element whose content begins at i; elements of its name within it are counted."""
    depth = 1
    while i < n:
        i = find(page, i, n, _LT)
        c = load_u8(page + i + 1) if i + 1 < n else 0
        if c == _BANG:
            i = skip_declaration(page, i + 2, n)
        elif c == _SLASH:
            found, i = hash_name(page, i + 2, n)
            if found == key:
                depth -= 1
                if depth == 0:
                    return min(find(page, i, n, _GT) + 1, n)
        else:
            found, i = hash_name(page, i + 1, n)
            i = skip_attributes(page, i, n)
            if found == key:
                depth += 1
            elif i64_at(tags)[find_tag(tags, found) * 4 + 2] == RAW:
                i = skip_raw(page, i, n, found)
    return n


@jitted
def skip_declaration(page, i, n):
    """The end of a comment or declaration whose content begins at i, after `<!`."""
    if i + 1 < n and load_u8(page + i) == _HYPHEN and load_u8(page + i + 1) == _HYPHEN:
        i += 2
        while True:
            i = find(page, i, n, _GT)
            if i >= n:
                return n
            if load_u8(page + i - 1) == _HYPHEN and load_u8(page + i - 2) == _HYPHEN:
                return i + 1
            i += 1
    return min(find(page, i, n, _GT) + 1, n)


@jitted
def find_tag(tags, key):
    """The row of a name in the table of tags, or an empty one."""
    slot = key & (N_SLOTS - 1)
    rows = i64_at(tags)
    while rows[slot * 4] != 0 and rows[slot * 4] != key:
        slot = (slot + 1) & (N_SLOTS - 1)
    return slot


@jitted
def hash_name(page, i, n):
    """The hash of the tag's name at i, and where it ends."""
    key = 0
    while i < n:
        c = load_u8(page + i)
        if c in (_GT, _SLASH, _LT) or is_space(c):
            break
        key = key * 31 + c
        i += 1
    return key, i


@jitted
def hash_attribute(page, i, n):
    """The hash of the attribute's name at i, and where it ends."""
    key, begin = 0, i
    while i < n:
        c = load_u8(page + i)
        if c in (_GT, _EQUALS) or is_space(c) or (c == _SLASH and i > begin):
            break
        key = key * 31 + c
        i += 1
    return key, i


@jitted
def find(page, i, n, byte):
    """The next place of a byte from i on; n if there is none."""
    while i < n and load_u8(page + i) != byte:
        i += 1
    return i


@jitted
def skip_space(page, i, n):
    """The first place from i on without white space; n if there is none."""
    while i < n:
        c = load_u8(page + i)
        if is_space(c):
            i += 1
        elif c == _AMPERSAND and i + 5 < n and load_u32(page + i + 1) == NBSP:
            i += 6
        else:
            break
    return min(i, n)


@jitted
def is_space(c):
    """True for ASCII white space."""
    return c == 32 or 9 <= c <= 13


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
    # As if there were a hyphen before and after the text.
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
