"""Blocks of a page as text: Markdown, with the structure that the page's tags gave them, or plain paragraphs."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from napkin.curation.extraction.boilerplate_lines import is_boilerplate_line
from napkin.curation.extraction.compiled import fields as f
from napkin.curation.extraction.page_tables import PageTables
from napkin.curation.extraction.tags import TAG

_HEADINGS = {TAG[f"h{level}"]: level for level in range(1, 7)}
_LIST_ITEMS = {TAG[name] for name in ("li", "dd")}
_CELLS = {TAG["td"], TAG["th"]}
_LONGEST_CELL = 300
"""Characters; a table with a longer one arranges a page and is not a table of data."""
_REPEATED = 60
"""Characters from which on a second text that is alike is a copy, such as the same page for small screens."""
_DEEPEST = 8
"""Levels of lists and quotations that are shown; deeper ones look like these."""
_CODE_MARK = chr(f.CODE_MARK)


class _Place(NamedTuple):
    """Where a block stands: rows of elements, -1 where there is none, and how deep it is in lists and quotations."""

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
        # A heading of nothing.
        texts.pop()
    return "".join(_markdown(texts) if markdown else _plain(texts)).strip("\n")


class _Places:
    """The places of elements, each found once: a place is that of the element above, with what its own tag adds."""

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
    """Whether two blocks are of one list, or of lists within one."""
    return place.item >= 0 and before.item >= 0 and place.outermost_list == before.outermost_list


def _table_lines(texts: list[tuple[_Place, str]]) -> list[str]:
    """A table's rows; the first is its head, and decides nothing of how many columns the others have."""
    rows: dict[int, dict[int, str]] = {}
    for place, text in texts:
        cells = rows.setdefault(place.row, {})
        text = text.replace("\n", " ").replace(_CODE_MARK, "`").replace("|", "\\|")
        cells[place.cell] = f"{cells[place.cell]} {text}" if place.cell in cells else text
    width = max(len(cells) for cells in rows.values())
    lines = ["| " + " | ".join([*cells.values(), *[""] * (width - len(cells))]) + " |" for cells in rows.values()]
    return [lines[0], "|" + " --- |" * width, *lines[1:]]
