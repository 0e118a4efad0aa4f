"""A serialized page in one pass: a row for each element that is more than a phrase, and one for each run of text.

The page is what the parser has made of it: each element is closed, attributes stand in double quotes, names are in
lower case. Should that not hold, the rows mean less, but nothing outside of the buffers is read or written. The choice
among the blocks of these tables stands last.
"""

from napkin.extraction.compiled import fields as f
from napkin.extraction.compiled.characters import copy_code, read_text
from napkin.extraction.compiled.markup import (
    HIDDEN_BIT,
    find,
    find_tag,
    hash_name,
    read_attributes,
    skip_attributes,
    skip_declaration,
    skip_element,
    skip_raw,
    skip_space,
)
from napkin.extraction.tags import BLOCK, PHRASE, PLACE_BIT, RAW, SKIPPED, TAG
from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import i64_at, load_u8, store_u8

_A, _BR, _B, _STRONG, _CODE = (TAG[name] for name in ("a", "br", "b", "strong", "code"))
_CODE_BIT = 1 << PLACE_BIT["code"]
_LT, _GT, _SLASH, _BANG = (ord(c) for c in "<>/!")
_NONE = -1
# Code within a sentence: none, its tag was read, its first character was.
_NO_CODE, _CODE_WANTED, _IN_CODE = range(3)


@CompiledFunction
def scan_page(state):
    """Fill the tables and the text of the state; 0 if there was room, else 1."""
    s = i64_at(state)
    page, n, text = s[f.PAGE], s[f.N_BYTES], s[f.TEXT]
    tags, automaton, found = s[f.TAGS], s[f.AUTOMATON], s[f.FOUND]
    elements, blocks, room = i64_at(s[f.ELEMENTS]), i64_at(s[f.BLOCKS]), s[f.ROOM]
    n_elements, n_blocks, n_text, current = 1, 0, 0, 0
    _clear(elements, f.N_ELEMENT)
    elements[f.END] = n
    # The block that is being read, or _NONE; what is open around it; line breaks since its last text; whether a space
    # stands before the next character.
    block, links, bold, code, breaks, spaced = _NONE, 0, 0, _NO_CODE, 0, False
    i = 0
    while i < n:
        if load_u8(page + i) != _LT:
            end = find(page, i, n, _LT)
            has_text = skip_space(page, i, end) < end
            is_code = (elements[current * f.N_ELEMENT + f.ALL_EVIDENCE] & _CODE_BIT) != 0
            if has_text and (block == _NONE or (breaks > 1 and not is_code)):
                if n_blocks >= room:
                    return 1
                block = n_blocks * f.N_BLOCK
                n_blocks += 1
                _clear_row(blocks, block, current, i, n_text)
                breaks, spaced = 0, False
            if block == _NONE:
                i = end
                continue
            if breaks > 0 and (has_text or is_code):
                store_u8(text + n_text, f.LINE_BREAK)
                n_text += 1
                breaks, spaced = 0, False
            if is_code:
                n_text = copy_code(page, i, end, text, n_text, blocks, block)
            elif has_text:
                marked = code == _CODE_WANTED
                code = _IN_CODE if marked else code
                n_text, spaced = read_text(page, i, end, text, n_text, blocks, block, spaced, links, bold, marked)
            else:
                spaced = True
            blocks[block + f.STOP] = n_text
            i = end
            continue
        c = load_u8(page + i + 1) if i + 1 < n else 0
        if c == _BANG:
            i = skip_declaration(page, i + 2, n)
            continue
        name = i + 2 if c == _SLASH else i + 1
        key, after = hash_name(page, name, n)
        if after == name:
            # Not a tag; the parser would not write this.
            i += 1
            continue
        row = find_tag(tags, key)
        tag, kind, place = i64_at(tags)[row * 4 + 1], i64_at(tags)[row * 4 + 2], i64_at(tags)[row * 4 + 3]
        kind = BLOCK if tag == 0 else kind
        if c == _SLASH:
            if kind == BLOCK:
                block, breaks, code = _NONE, 0, _NO_CODE
                if elements[current * f.N_ELEMENT + f.TAG] == tag and current > 0:
                    elements[current * f.N_ELEMENT + f.END] = i
                    current = elements[current * f.N_ELEMENT + f.PARENT]
            elif tag == _A:
                links = max(links - 1, 0)
            elif tag in (_B, _STRONG):
                bold = max(bold - 1, 0)
            elif tag == _CODE:
                if code == _IN_CODE and block != _NONE:
                    store_u8(text + n_text, f.CODE_MARK)
                    n_text += 1
                    blocks[block + f.STOP] = n_text
                code = _NO_CODE
            i = min(find(page, after, n, _GT) + 1, n)
            continue
        evidence = 0
        if kind in (BLOCK, PHRASE):
            evidence, end = read_attributes(page, after, n, automaton, found)
        else:
            end = skip_attributes(page, after, n)
        if kind == RAW:
            end = skip_raw(page, end, n, key)
        elif kind == SKIPPED or (kind == PHRASE and evidence & HIDDEN_BIT):
            end = skip_element(page, end, n, key, tags)
        elif kind == BLOCK:
            if n_elements >= room:
                return 1
            _open_element(elements, n_elements, current, tag, i, n, evidence | place)
            current = n_elements
            n_elements += 1
            block, breaks, code = _NONE, 0, _NO_CODE
        elif tag == _A:
            links += 1
            if block != _NONE:
                blocks[block + f.LINKS] += 1
        elif tag in (_B, _STRONG):
            bold += 1
        elif tag == _BR:
            breaks += 1
        elif tag == _CODE:
            code = _CODE_WANTED
        i = end
    s[f.N_ELEMENTS], s[f.N_BLOCKS], s[f.N_TEXT] = n_elements, n_blocks, n_text
    _sum_up(elements, n_elements, blocks, n_blocks)
    return 0


@jitted
def _clear(row, n):
    for j in range(n):
        row[j] = 0


@jitted
def _clear_row(blocks, block, element, place, n_text):
    """Begin the row of a block."""
    for j in range(f.N_BLOCK):
        blocks[block + j] = 0
    blocks[block + f.ELEMENT] = element
    blocks[block + f.PLACE] = place
    blocks[block + f.BEGIN] = n_text
    blocks[block + f.STOP] = n_text


@jitted
def _open_element(elements, number, current, tag, place, n, evidence):
    """Begin the row of an element within the current one."""
    row, above = number * f.N_ELEMENT, current * f.N_ELEMENT
    for j in range(f.N_ELEMENT):
        elements[row + j] = 0
    elements[row + f.TAG] = tag
    elements[row + f.PARENT] = current
    elements[row + f.BEGIN_TAG] = place
    elements[row + f.END] = n
    elements[row + f.EVIDENCE] = evidence
    elements[row + f.DEPTH] = elements[above + f.DEPTH] + 1
    # Attributes of <html> and <body> describe the page as a whole, not its parts.
    if elements[row + f.DEPTH] > 2:
        elements[row + f.ALL_EVIDENCE] = elements[above + f.ALL_EVIDENCE] | evidence


@jitted
def _sum_up(elements, n_elements, blocks, n_blocks):
    """The sums of each element over its blocks. A parent's row stands before those of its children."""
    for k in range(n_blocks):
        block, row = k * f.N_BLOCK, blocks[k * f.N_BLOCK + f.ELEMENT] * f.N_ELEMENT
        characters, linked = blocks[block + f.CHARACTERS], blocks[block + f.LINKED]
        elements[row + f.SUM_CHARACTERS] += characters
        elements[row + f.SUM_LINKED] += linked
        if characters >= 80 and blocks[block + f.MARKS] >= 1 and 3 * linked < characters:
            elements[row + f.SUM_PROSE] += characters
        elements[row + f.SUM_BLOCKS] += 1
    for k in range(n_elements - 1, 0, -1):
        row = k * f.N_ELEMENT
        above = elements[row + f.PARENT] * f.N_ELEMENT
        for j in range(f.SUM_CHARACTERS, f.SUM_BLOCKS + 1):
            elements[above + j] += elements[row + j]


@CompiledFunction
def choose_blocks(elements, n_elements, blocks, n_blocks, gains, costs, switch, block_switch):
    """Choose blocks with the least energy: replace the gain of each by 1 if it is kept, else by 0.

    A kept block gives its gain. Each element whose label, kept or not, differs from that of the element around it costs
    `switch`, and a block that differs from its element `block_switch`: so kept blocks are contiguous, and so are the
    others. On a tree the minimum is found exactly, in one pass up and one down (dynamic programming).

    `costs` has room for two int64 per element: its least energy if it is left out, and if it is kept. The document as a
    whole is left out.
    """
    rows, texts, gain, cost = i64_at(elements), i64_at(blocks), i64_at(gains), i64_at(costs)
    for k in range(2 * n_elements):
        cost[k] = 0
    for k in range(n_blocks):
        element = texts[k * f.N_BLOCK + f.ELEMENT]
        cost[2 * element] += min(0, block_switch - gain[k])
        cost[2 * element + 1] += min(block_switch, -gain[k])
    for k in range(n_elements - 1, 0, -1):
        above = rows[k * f.N_ELEMENT + f.PARENT]
        out, kept = cost[2 * k], cost[2 * k + 1]
        cost[2 * above] += min(out, kept + switch)
        cost[2 * above + 1] += min(kept, out + switch)
    # Downwards: the first cost of an element becomes its label.
    cost[0] = 0
    for k in range(1, n_elements):
        out, kept = cost[2 * k], cost[2 * k + 1]
        if cost[2 * rows[k * f.N_ELEMENT + f.PARENT]] == 1:
            cost[2 * k] = 1 if kept <= out + switch else 0
        else:
            cost[2 * k] = 1 if kept + switch < out else 0
    for k in range(n_blocks):
        if cost[2 * texts[k * f.N_BLOCK + f.ELEMENT]] == 1:
            gain[k] = 1 if -gain[k] <= block_switch else 0
        else:
            gain[k] = 1 if gain[k] > block_switch else 0
