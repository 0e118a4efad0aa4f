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
_NO_ROOM = -1


@CompiledFunction
def scan_page(state):
    """Fill the tables and the text of the state; 0 if there was room, else 1."""
    s = i64_at(state)
    page, n, elements = s[f.PAGE], s[f.N_BYTES], i64_at(s[f.ELEMENTS])
    for j in range(f.N_ELEMENT):
        elements[j] = 0
    elements[f.END] = n
    s[f.N_ELEMENTS], s[f.N_BLOCKS], s[f.N_TEXT], s[f.CURRENT] = 1, 0, 0, 0
    s[f.OPEN_LINKS], s[f.OPEN_BOLD], s[f.SPACED] = 0, 0, 0
    _end_block(s)
    i = 0
    while i < n:
        if load_u8(page + i) != _LT:
            i = _read_run(s, i, find(page, i, n, _LT))
            if i == _NO_ROOM:
                return 1
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
        elif c == _SLASH:
            _close(s, key, i)
            i = min(find(page, after, n, _GT) + 1, n)
        else:
            i = _open(s, key, i, after)
            if i == _NO_ROOM:
                return 1
    _sum_up(elements, s[f.N_ELEMENTS], i64_at(s[f.BLOCKS]), s[f.N_BLOCKS])
    return 0


@jitted
def _end_block(s):
    """The next text begins a block."""
    s[f.BLOCK], s[f.BREAKS], s[f.CODE] = f.NO_BLOCK, 0, f.NO_CODE


@jitted
def _read_run(s, i, end):
    """Add bytes i to end, without markup, to the block that is being read, or to a new one; `end`, or _NO_ROOM."""
    page, text, blocks = s[f.PAGE], s[f.TEXT], i64_at(s[f.BLOCKS])
    has_text = skip_space(page, i, end) < end
    is_code = (i64_at(s[f.ELEMENTS])[s[f.CURRENT] * f.N_ELEMENT + f.ALL_EVIDENCE] & _CODE_BIT) != 0
    if has_text and (s[f.BLOCK] == f.NO_BLOCK or (s[f.BREAKS] > 1 and not is_code)):
        if s[f.N_BLOCKS] >= s[f.ROOM]:
            return _NO_ROOM
        s[f.BLOCK] = s[f.N_BLOCKS] * f.N_BLOCK
        s[f.N_BLOCKS] += 1
        _clear_row(blocks, s[f.BLOCK], s[f.CURRENT], i, s[f.N_TEXT])
        s[f.BREAKS], s[f.SPACED] = 0, 0
    block, n_text = s[f.BLOCK], s[f.N_TEXT]
    if block == f.NO_BLOCK:
        return end
    if s[f.BREAKS] > 0 and (has_text or is_code):
        store_u8(text + n_text, f.LINE_BREAK)
        n_text += 1
        s[f.BREAKS], s[f.SPACED] = 0, 0
    if is_code:
        n_text = copy_code(page, i, end, text, n_text, blocks, block)
    elif has_text:
        begins_code = s[f.CODE] == f.CODE_WANTED
        if begins_code:
            s[f.CODE] = f.IN_CODE
        n_text, spaced = read_text(
            page,
            i,
            end,
            text,
            n_text,
            blocks,
            block,
            s[f.SPACED] == 1,
            s[f.OPEN_LINKS],
            s[f.OPEN_BOLD],
            begins_code,
        )
        s[f.SPACED] = 1 if spaced else 0
    else:
        s[f.SPACED] = 1
    blocks[block + f.STOP], s[f.N_TEXT] = n_text, n_text
    return end


@jitted
def _close(s, key, i):
    """Close the element whose end tag begins at i."""
    tag, kind, _ = _tag_of(s, key)
    if kind == BLOCK:
        _end_block(s)
        elements, row = i64_at(s[f.ELEMENTS]), s[f.CURRENT] * f.N_ELEMENT
        if elements[row + f.TAG] == tag and row > 0:
            elements[row + f.END] = i
            s[f.CURRENT] = elements[row + f.PARENT]
    elif tag == _A:
        s[f.OPEN_LINKS] = max(s[f.OPEN_LINKS] - 1, 0)
    elif tag in (_B, _STRONG):
        s[f.OPEN_BOLD] = max(s[f.OPEN_BOLD] - 1, 0)
    elif tag == _CODE:
        if s[f.CODE] == f.IN_CODE and s[f.BLOCK] != f.NO_BLOCK:
            store_u8(s[f.TEXT] + s[f.N_TEXT], f.CODE_MARK)
            s[f.N_TEXT] += 1
            i64_at(s[f.BLOCKS])[s[f.BLOCK] + f.STOP] = s[f.N_TEXT]
        s[f.CODE] = f.NO_CODE


@jitted
def _open(s, key, i, after):
    """Open the element whose start tag begins at i, its name ending at `after`; where its content begins, or _NO_ROOM.

    What is not shown is passed over: then it is where the element ends.
    """
    page, n = s[f.PAGE], s[f.N_BYTES]
    tag, kind, place = _tag_of(s, key)
    evidence = 0
    if kind in (BLOCK, PHRASE):
        evidence, end = read_attributes(page, after, n, s[f.AUTOMATON], s[f.FOUND])
    else:
        end = skip_attributes(page, after, n)
    if kind == RAW:
        return skip_raw(page, end, n, key)
    if kind == SKIPPED or (kind == PHRASE and evidence & HIDDEN_BIT):
        return skip_element(page, end, n, key, s[f.TAGS])
    if kind == BLOCK:
        if s[f.N_ELEMENTS] >= s[f.ROOM]:
            return _NO_ROOM
        _begin_element(i64_at(s[f.ELEMENTS]), s[f.N_ELEMENTS], s[f.CURRENT], tag, i, n, evidence | place)
        s[f.CURRENT] = s[f.N_ELEMENTS]
        s[f.N_ELEMENTS] += 1
        _end_block(s)
    elif tag == _A:
        s[f.OPEN_LINKS] += 1
        if s[f.BLOCK] != f.NO_BLOCK:
            i64_at(s[f.BLOCKS])[s[f.BLOCK] + f.LINKS] += 1
    elif tag in (_B, _STRONG):
        s[f.OPEN_BOLD] += 1
    elif tag == _BR:
        s[f.BREAKS] += 1
    elif tag == _CODE:
        s[f.CODE] = f.CODE_WANTED
    return end


@jitted
def _tag_of(s, key):
    """The number of a tag by the hash of its name, its kind, and its bits of places; an unknown one is a block."""
    row = find_tag(s[f.TAGS], key) * 4
    tags = i64_at(s[f.TAGS])
    tag = tags[row + 1]
    return tag, BLOCK if tag == 0 else tags[row + 2], tags[row + 3]


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
def _begin_element(elements, number, current, tag, place, n, evidence):
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
