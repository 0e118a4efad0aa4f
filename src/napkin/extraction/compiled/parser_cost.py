"""The cost of parsing a page, before it is parsed: a small page can ask for millions of elements.

A formatting element that is not closed (`<b>`, `<font>` ...) is opened again in each block that follows, as the HTML
standard demands ("reconstruct the active formatting elements"): n of them before m paragraphs make n times m elements.
Among elements of equal name and attributes, only the last three are ("Noah's Ark clause"). And a parser compares each
attribute of a tag with those before it.
"""

from napkin.extraction.compiled.markup import find, is_space, skip_declaration
from napkin.extraction.tags import FORMATTING, name_hash
from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import i64_at, load_u8

_FORMATTING = tuple(name_hash(name.encode()) for name in FORMATTING)
_SCRIPT, _STYLE = name_hash(b"script"), name_hash(b"style")
_LT, _GT, _SLASH, _BANG, _QUOTE, _APOSTROPHE = (ord(c) for c in "<>/!\"'")
_ALIKE = 3

# The counters that the caller provides, int64 and zero: by name and by tag, how many formatting elements are open, and
# how many of a name are opened again.
N_NAMES, N_TAGS = 16, 4096
N_COUNTERS = 2 * N_NAMES + N_TAGS


@CompiledFunction
def parser_cost(page, n, counters, result, elements_enough, squares_enough):
    """Two int64: at least as many elements as the parser makes, and the sum of the squares of attributes in a tag.

    Counting ends once one of them exceeds its limit.
    """
    opened, again, alike = i64_at(counters), i64_at(counters + 8 * N_NAMES), i64_at(counters + 16 * N_NAMES)
    elements, squares, active, i = 0, 0, 0, 0
    while i < n and elements <= elements_enough and squares <= squares_enough:
        i = find(page, i, n, _LT) + 1
        c = load_u8(page + i) if i < n else 0
        if c == _BANG:
            i = skip_declaration(page, i + 1, n)
            continue
        closing = c == _SLASH
        begin = i + 1 if closing else i
        key, i = _lower_name(page, begin, n)
        if i == begin:
            continue
        whole, attributes, i = _rest_of_tag(page, i, n, key)
        which = _which_formatting(key)
        if closing:
            if which >= 0 and opened[which] > 0:
                opened[which] -= 1
                if again[which] > opened[which]:
                    active -= again[which] - opened[which]
                    again[which] = opened[which]
            continue
        elements += 1 + active
        squares += attributes * attributes
        if which >= 0:
            slot = whole & (N_TAGS - 1)
            opened[which] += 1
            alike[slot] += 1
            if alike[slot] <= _ALIKE or again[which] == 0:
                again[which] += 1
                active += 1
        elif key in (_SCRIPT, _STYLE):
            i = _skip_raw_text(page, i, n, key)
    out = i64_at(result)
    out[0], out[1] = elements, squares


@jitted
def _which_formatting(key):
    """The number of a formatting element's name, or -1."""
    for k in range(len(_FORMATTING)):
        if _FORMATTING[k] == key:
            return k
    return -1


@jitted
def _lower_name(page, i, n):
    """The hash of the tag's name at i in lower case, and where it ends; i itself if no name begins there."""
    key = 0
    first = load_u8(page + i) | 32 if i < n else 0
    if not 97 <= first <= 122:
        return key, i
    while i < n:
        c = load_u8(page + i)
        if c in (_GT, _SLASH) or is_space(c):
            break
        key = key * 31 + (c | 32 if 65 <= c <= 90 else c)
        i += 1
    return key, i


@jitted
def _rest_of_tag(page, i, n, key):
    """The hash of the whole tag, the number of its attributes (or more), and where it ends."""
    attributes, quote, spaced = 0, 0, False
    while i < n:
        c = load_u8(page + i)
        i += 1
        if quote != 0:
            if c == quote:
                quote = 0
                spaced = True
        elif c == _GT:
            break
        elif c in (_QUOTE, _APOSTROPHE):
            quote = c
        elif is_space(c) or c == _SLASH:
            spaced = True
            continue
        elif spaced:
            attributes += 1
            spaced = False
        key = key * 31 + c
    return key ^ (key >> 29), attributes, i


@jitted
def _skip_raw_text(page, i, n, key):
    """The end of the content of a script or style that begins at i."""
    while i < n:
        i = find(page, i, n, _LT) + 1
        if i < n and load_u8(page + i) == _SLASH:
            found, after = _lower_name(page, i + 1, n)
            if found == key:
                return after
    return n
