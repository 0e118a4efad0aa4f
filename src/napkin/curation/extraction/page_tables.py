"""A page as two tables: its elements and its blocks of text, as `compiled/fields.py` says."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from napkin.curation.extraction.compiled import fields as f
from napkin.curation.extraction.compiled.loading import EXTRACTION
from napkin.curation.extraction.evidence import automaton
from napkin.curation.extraction.tags import tag_table


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
    from napkin.curation.extraction.compiled.scan import scan_page

    room = min(page.count(b"<"), most_elements) + 2
    elements, blocks = np.empty((room, f.N_ELEMENT), np.int64), np.empty((room, f.N_BLOCK), np.int64)
    table, found = automaton()
    state = np.zeros(f.N_STATE, np.int64)
    # Words of four bytes are read, of which three may stand behind the last one.
    padded = np.frombuffer(page + bytes(8), np.uint8)
    text = np.empty(len(page) + 8, np.uint8)
    state[f.PAGE], state[f.N_BYTES], state[f.TEXT] = padded.ctypes.data, len(page), text.ctypes.data
    state[f.TAGS], state[f.AUTOMATON], state[f.FOUND] = tag_table().ctypes.data, table.ctypes.data, found.ctypes.data
    state[f.ELEMENTS], state[f.BLOCKS], state[f.ROOM] = elements.ctypes.data, blocks.ctypes.data, room
    if scan_page(state.ctypes.data):
        return None
    return PageTables(text[: state[f.N_TEXT]].tobytes(), elements[: state[f.N_ELEMENTS]], blocks[: state[f.N_BLOCKS]])
