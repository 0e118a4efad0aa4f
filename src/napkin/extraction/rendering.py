"""Blocks of a page as text: Markdown, with the structure that the page's tags gave them, or plain paragraphs.

Short lines that are not a page's own words wherever they stand: what sites say about advertising, sharing, comments.

A line is one of them as a whole; in running text the same words are left alone.

A page as two tables: its elements and its blocks of text, as `compiled/fields.py` says.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from napkin.extraction.compiled import EXTRACTION
from napkin.extraction.compiled import fields as f
from napkin.extraction.tags import TAG, automaton, tag_table

LONGEST = 160
"""Characters of the longest line that is compared."""

_WHOLE = (
    # Advertising.
    r"adverti[sz]ements?|adverts?|ads?|sponsored( content| links?)?|promoted( content)?|paid content|anzeige|werbung",
    r"publicité|publicidad|publicidade|pubblicità|reklam[ae]?|реклама|広告|广告",
    r"(story|article) continues (below|after)( (the )?adverti[sz]ement)?|continue reading( the main story| below)?",
    r"scroll (down )?(for more|to continue)( .*)?|loading( ?\.\.\.|…)?|please wait.{0,20}",
    # Sharing and comments.
    r"share( this)?( (article|story|page|post))?( (on|via|with) .{1,30})?",
    r"facebook|twitter|whatsapp|e?-?mail|print|tweet|pinterest",
    r"teilen|partager|compartir|compartilhar|condividi|поделиться",
    r"(\d+|no|view|show|all|read|post|leave|add|write) ?(a |all |the |\d+ )?(comments?|repl(y|ies)|responses?)",
    r"comments?( \(\d+\))?",
    r"tell us what you think.{0,20}|(what do you think|join the conversation|have your say)[?!.]?( .{0,60})?",
    r"follow .{1,80} on (twitter|facebook|instagram|youtube|linkedin)\b.{0,60}|follow us\b.{0,60}",
    r"(sign up|subscribe|register)( now| here| today| for free)?( (for|to)\b.{0,80}newsletters?.{0,40})?[.!]?",
    r"(like|join) us on (facebook|twitter|instagram).{0,40}",
    # Other pages.
    r"(read|see|watch)( (more|also|next|now))( ?:.{0,140})?",
    r"(lesen|lire|lea|leia|leggi)( (sie auch|mehr|aussi|también|também|mais|anche))( ?:.{0,140})?",
    r"(related|recommended|more)( (articles?|stories|posts?|reading|videos?|topics?|news|coverage))?( ?:.{0,140})?",
    r"siehe auch ?:.{0,140}|mehr zum thema|читайте также.{0,120}",
    r"you (may|might) (also )?(like|be interested in).{0,20}|(previous|next)( (article|post|story|page))?",
    r"(click|tap) here (to|for) .{0,80}|back to top|skip to (main )?content",
    # Pictures.
    r"(image|photo|picture)s? ?(copyright|caption|credits?|by|courtesy( of)?)\b.{0,140}|(photo|image|picture|video)s?",
    r"(credits?|photos?|images?|fotos?|bild|source|quelle) ?[:/©].{0,80}|\(?(getty( images)?|ap photo|reuters|afp)\)?",
    r"(play|watch) video|media playback is (un)?supported.{0,40}|enlarge( this image)?|hide caption|toggle caption",
    # Legal.
    r"(©|copyright\b|\(c\) ?\d{4}).{0,140}|all rights reserved.{0,40}|report (a typo|an error|this ad)",
)
_PATTERN = re.compile(r"[\W_]*(?:" + "|".join(_WHOLE) + r")[\W_]*", re.IGNORECASE)


def is_boilerplate_line(text: str) -> bool:
    """True for a line that is the site's, not the page's."""
    return len(text) <= LONGEST and _PATTERN.fullmatch(text) is not None


@dataclass(frozen=True)
class PageTables:
    """`elements` is [elements, N_ELEMENT], row 0 the document; `blocks` is [blocks, N_BLOCK], in document order.

    `text` is that of all blocks, one after another, in UTF-8.
    """

    text: bytes
    elements: NDArray[np.int64]
    blocks: NDArray[np.int64]


def page_tables(page: bytes, most_elements: int) -> PageTables | None:
    """The tables of a page that the parser has serialized as UTF-8; None if there are more than `most_elements`."""
    EXTRACTION.load("scan")
    from napkin.extraction.compiled.scan import scan_page

    room = min(page.count(b"<"), most_elements) + 2
    elements, blocks = np.empty((room, f.N_ELEMENT), np.int64), np.empty((room, f.N_BLOCK), np.int64)
    table, found = automaton()
    state = np.zeros(f.N_STATE, np.int64)
    # Words of four bytes are read, which may extend three bytes beyond the end.
    padded = np.frombuffer(page + bytes(8), np.uint8)
    text = np.empty(len(page) + 8, np.uint8)
    state[f.PAGE], state[f.N_BYTES], state[f.TEXT] = padded.ctypes.data, len(page), text.ctypes.data
    state[f.TAGS], state[f.AUTOMATON], state[f.FOUND] = tag_table().ctypes.data, table.ctypes.data, found.ctypes.data
    state[f.ELEMENTS], state[f.BLOCKS], state[f.ROOM] = elements.ctypes.data, blocks.ctypes.data, room
    if scan_page(state.ctypes.data):
        return None
    return PageTables(text[: state[f.N_TEXT]].tobytes(), elements[: state[f.N_ELEMENTS]], blocks[: state[f.N_BLOCKS]])


_HEADINGS = {TAG[f"h{level}"]: level for level in range(1, 7)}
_LIST_ITEMS = {TAG[name] for name in ("li", "dd")}
_CELLS = {TAG["td"], TAG["th"]}
_LONGEST_CELL = 300
"""Characters; a table with a longer one arranges a page and is not a table of data."""
_REPEATED = 60
"""The shortest repeated text, in characters, that is taken as a copy, such as the same page for small screens."""
_DEEPEST = 8
"""The most levels of lists and quotations that are shown; deeper ones look like the deepest."""
_CODE_MARK = chr(f.CODE_MARK)


class _Place(NamedTuple):
    """A block's place: rows of elements, -1 where there is none, and its depth in lists and quotations."""

    heading: int
    item: int
    items: int
    outermost_list: int
    list_depth: int
    numbered: bool
    cell: int
    row: int
    table: int
    code: int
    quotes: int


def render(tables: PageTables, kept: NDArray[np.bool_], *, markdown: bool, whole: bool = False) -> str:
    """The text of the blocks that are kept; `whole` keeps lines that look like boilerplate, and repeated ones."""
    places = _Places(tables)
    texts: list[tuple[_Place, str]] = []
    seen: set[str] = set()
    blocks = tables.blocks[kept][:, (f.ELEMENT, f.BEGIN, f.STOP)].tolist()
    for element, begin, stop in blocks:
        text = tables.text[begin:stop].decode("utf-8", "replace")
        place = places.of(element)
        if not whole:
            if place.code < 0 and place.cell < 0 and is_boilerplate_line(text):
                continue
            if len(text) >= _REPEATED:
                if text in seen:
                    continue
                seen.add(text)
        texts.append((place, text))
    while texts and not whole and texts[-1][0].heading:
        # A heading without a text.
        texts.pop()
    return "".join(_markdown(texts) if markdown else _plain(texts)).strip("\n")


class _Places:
    """The structural place of each element, computed once: that of its parent, extended by its own tag."""

    def __init__(self, tables: PageTables) -> None:
        self._tags = tables.elements[:, f.TAG].tolist()
        self._parents = tables.elements[:, f.PARENT].tolist()
        self._known = {0: _Place(0, -1, -1, -1, 0, False, -1, -1, -1, -1, 0)}

    def of(self, element: int) -> _Place:
        """The place of a block that stands in `element`."""
        path = []
        while element not in self._known:
            path.append(element)
            element = self._parents[element]
        place = self._known[element]
        for element in reversed(path):
            place = self._known[element] = self._within(place, element)
        return place

    def _within(self, p: _Place, element: int) -> _Place:
        tag = self._tags[element]
        if tag in _HEADINGS:
            return p._replace(heading=_HEADINGS[tag])
        if tag in _LIST_ITEMS:
            return p._replace(item=element)
        if tag in (_UL, _OL):
            return p._replace(
                items=element,
                outermost_list=p.outermost_list if p.list_depth else element,
                list_depth=min(p.list_depth + 1, _DEEPEST),
                numbered=tag == _OL,
            )
        if tag in _CELLS:
            return p._replace(cell=element)
        if tag == _TR:
            return p._replace(row=element)
        if tag == _TABLE:
            return p._replace(table=element, cell=-1, row=-1)
        if tag == _PRE:
            return p._replace(code=element)
        if tag == _QUOTE:
            return p._replace(quotes=min(p.quotes + 1, _DEEPEST))
        return p


_UL, _OL, _TR, _TABLE, _PRE, _QUOTE = (TAG[name] for name in ("ul", "ol", "tr", "table", "pre", "blockquote"))


def _data_tables(texts: list[tuple[_Place, str]]) -> set[int]:
    """The tables, by their row, that hold data: at least one row with two cells, and no long cell."""
    cells_of: dict[int, set[int]] = {}
    wide: set[int] = set()
    long: set[int] = set()
    for place, text in texts:
        if place.table >= 0 and place.cell >= 0:
            cells = cells_of.setdefault(place.row, set())
            cells.add(place.cell)
            if len(cells) > 1:
                wide.add(place.table)
            if len(text) > _LONGEST_CELL:
                long.add(place.table)
    return wide - long


def _plain(texts: list[tuple[_Place, str]]) -> Iterator[str]:
    """Paragraphs with an empty line between them; items of a list and rows of a table stand close."""
    data = _data_tables(texts)
    before: _Place | None = None
    for place, text in texts:
        in_table = place.table in data and place.cell >= 0
        if before is not None:
            same_table = in_table and before.table == place.table
            if same_table and before.cell == place.cell:
                yield " "
            elif same_table and before.row == place.row:
                yield "\t"
            elif same_table or _stand_close(place, before):
                yield "\n"
            else:
                yield "\n\n"
        text = text.replace(_CODE_MARK, "")
        yield text.replace("\n", " ") if in_table else text
        before = place


def _markdown(texts: list[tuple[_Place, str]]) -> Iterator[str]:
    """Headings, lists, tables, quotations and code as CommonMark and GitHub's tables have them."""
    data = _data_tables(texts)
    numbers: dict[int, int] = {}
    last_item: dict[int, int] = {}
    before: _Place | None = None
    i = 0
    while i < len(texts):
        place, text = texts[i]
        prefix = "> " * place.quotes
        if place.table in data and place.cell >= 0:
            end = i
            while end < len(texts) and texts[end][0].table == place.table:
                end += 1
            lines, i = _table_lines(texts[i:end]), end
        else:
            i += 1
            if place.code >= 0:
                lines = ["```", *text.replace(_CODE_MARK, "").strip("\n").split("\n"), "```"]
            else:
                lines = text.replace(_CODE_MARK, "`").split("\n")
            if place.heading:
                lines = ["#" * place.heading + " " + " ".join(lines)]
        if place.item >= 0:
            depth = max(place.list_depth - 1, 0)
            first = last_item.get(place.items) != place.item
            if first:
                last_item[place.items] = place.item
                numbers[place.items] = numbers.get(place.items, 0) + 1
            bullet = f"{numbers[place.items]}. " if place.numbered else "- "
            lines = [("    " * depth) + (bullet if first and k == 0 else "  ") + line for k, line in enumerate(lines)]
        if before is not None:
            if not _stand_close(place, before):
                quotes = min(place.quotes, before.quotes)
                yield "\n" + ("> " * quotes).rstrip()
            yield "\n"
        yield "\n".join((prefix + line).rstrip() for line in lines)
        before = place


def _stand_close(place: _Place, before: _Place) -> bool:
    """True if two blocks are of one list, or of lists within one."""
    return place.item >= 0 and before.item >= 0 and place.outermost_list == before.outermost_list


def _table_lines(texts: list[tuple[_Place, str]]) -> list[str]:
    """A table's rows; the first is its head, but does not determine the number of columns of the others."""
    rows: dict[int, dict[int, str]] = {}
    for place, text in texts:
        cells = rows.setdefault(place.row, {})
        text = text.replace("\n", " ").replace(_CODE_MARK, "`").replace("|", "\\|")
        cells[place.cell] = f"{cells[place.cell]} {text}" if place.cell in cells else text
    width = max(len(cells) for cells in rows.values())
    lines = ["| " + " | ".join([*cells.values(), *[""] * (width - len(cells))]) + " |" for cells in rows.values()]
    return [lines[0], "|" + " --- |" * width, *lines[1:]]
