"""The text of an HTML page: bytes, characters, tree, tables of elements and blocks, a choice among these, text.

The main content is a contiguous choice of blocks, by a score for each block. The score is the logarithm of odds that
logistic regression gives a block, from what `block_features` measures of it. The weights were fitted by
`benchmarks/curation_extraction.py --fit` on half of the pages of a published benchmark.

Pages that would become too large when parsed are refused; see `compiled/parser_cost.py` for how small ones do.
"""

import math
import re
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from napkin.errors import import_extra
from napkin.extraction.compiled import EXTRACTION
from napkin.extraction.compiled import fields as f
from napkin.extraction.page_metadata import PageMetadata, decode_page, page_metadata
from napkin.extraction.rendering import PageTables, page_tables, render
from napkin.extraction.tags import BIT, FIRST_PLACE, PATTERNS, PLACE_BIT, PLACES, TAG
from napkin.toml_files import packaged_toml

_GROUPS: dict[str, str] = {
    "p": "p",
    "h1": "h1",
    "h2": "h2 h3 h4 h5 h6",
    "li": "li dt dd",
    "td": "td th",
    "blockquote": "blockquote",
    "pre": "pre",
    "caption": "figcaption caption",
}
_OWN = "length linked marks sentence capitals digits bold words has_link long short".split()
_NEAR = "length linked sentence marks".split()
_ABOVE = "linked prose_share text_share".split()
N_ABOVE = 4
NAMES: tuple[str, ...] = (
    "bias",
    *_OWN,
    *(f"tag {name}" for name in _GROUPS),
    *(f"{name} at {i:+d}" for i in (-2, -1, 1, 2) for name in _NEAR),
    *(f"{name} of {i}" for i in range(N_ABOVE) for name in _ABOVE),
    *("position", "prose before", "after h1", "in best", "child of best", "best share", "depth below best"),
    *(f"own {name}" for name in PATTERNS),
    *(f"own place {name}" for name in PLACES),
    *(f"above {name}" for name in PATTERNS),
    *(f"above place {name}" for name in PLACES),
)


def block_features(tables: PageTables) -> NDArray[np.float32]:
    """A row of numbers of about -1 to 1 for each block, named by `NAMES`."""
    blocks, elements = tables.blocks, tables.elements
    n = len(blocks)
    element = blocks[:, f.ELEMENT]
    tag = elements[element, f.TAG]
    characters = blocks[:, f.CHARACTERS].astype(np.float32) + 1
    words = blocks[:, f.WORDS].astype(np.float32) + 1
    length = np.log2(characters) / 10
    linked = blocks[:, f.LINKED] / characters
    marks = np.minimum(blocks[:, f.MARKS] / words * 10, 3) / 3
    sentence = blocks[:, f.IS_SENTENCE].astype(np.float32)
    out = np.zeros((n, len(NAMES)), np.float32)
    columns: list = [
        np.ones(n),
        length,
        linked,
        marks,
        sentence,
        blocks[:, f.CAPITALS] / words,
        blocks[:, f.DIGITS] / characters,
        blocks[:, f.BOLD] / characters,
        np.minimum(characters / words, 15) / 15,
        blocks[:, f.LINKS] > 0,
        characters > 200,
        characters < 40,
    ]
    columns += [np.isin(tag, [TAG[t] for t in tags.split()]) for tags in _GROUPS.values()]
    near = [np.pad(values, 2) for values in (length, linked, sentence, marks)]
    columns += [values[2 + i : 2 + i + n] for i in (-2, -1, 1, 2) for values in near]
    total_prose = float(elements[0, f.SUM_PROSE]) + 1
    total_text = float(elements[0, f.SUM_CHARACTERS]) + 1
    above = element
    for _ in range(N_ABOVE):
        sums = elements[above]
        columns.append(sums[:, f.SUM_LINKED] / (sums[:, f.SUM_CHARACTERS] + 1))
        columns.append(sums[:, f.SUM_PROSE] / total_prose)
        columns.append(sums[:, f.SUM_CHARACTERS] / total_text)
        above = elements[above, f.PARENT]
    before = np.cumsum(characters) - characters
    columns.append(before / total_text)
    prose = np.where((characters >= 80) & (blocks[:, f.MARKS] > 0) & (linked < 0.33), characters, 0)
    columns.append((np.cumsum(prose) - prose) / total_prose)
    h1 = np.flatnonzero(tag == TAG["h1"])
    columns.append(np.arange(n) > (h1[0] if len(h1) else n))
    parent = elements[element, f.PARENT]
    by_parent = np.bincount(parent, weights=prose, minlength=len(elements))
    best = int(by_parent.argmax()) if n else 0
    begin, end = elements[best, f.BEGIN_TAG], elements[best, f.END]
    in_best = (blocks[:, f.PLACE] >= begin) & (blocks[:, f.PLACE] < end)
    columns.append(in_best)
    columns.append(parent == best)
    columns.append(in_best * (by_parent[best] / total_prose))
    columns.append(in_best * np.minimum(elements[element, f.DEPTH] - elements[best, f.DEPTH], 8) / 8)
    own, all_ = elements[element, f.EVIDENCE], elements[element, f.ALL_EVIDENCE]
    bits = [*range(len(PATTERNS)), *range(FIRST_PLACE, FIRST_PLACE + len(PLACES))]
    for values in (own, all_):
        columns += [(values >> b) & 1 for b in bits]
    for j, column in enumerate(columns):
        out[:, j] = column
    assert len(columns) == len(NAMES)
    return out


_BEST_SHARE = 0.1
_BEST_CHARACTERS = 300.0
"""Each page has something to say: its best blocks, with this share of its text or, if less, so many characters,"""
_BEST_SCORE = 1.0
"""have at least this score; where they do not, all scores are raised by the same amount."""
_SWITCH, _BLOCK_SWITCH = 1.5, 0.6
"""Costs of a change between an element, or a block, and its neighbours, in units of a score times a length."""
_UNIT = 100.0
"""A block of this many characters has weight 1; weights grow with the square root of the length."""
_SCALE = 1024
"""Energies are scaled to integers, so that they are the same on every machine."""


def main_blocks(tables: PageTables) -> NDArray[np.bool_]:
    """For each block, True if it belongs to the main content; of repeated texts, only the first does."""
    if not len(tables.blocks):
        return np.zeros(0, bool)
    return chosen_blocks(tables, block_features(tables) @ block_weights())


def with_main_heading(tables: PageTables, kept: NDArray[np.bool_], title: str) -> NDArray[np.bool_]:
    """The blocks that are kept, and the page's main heading where it stands apart: an `h1` before the first of them.

    Of several the one that is the longest part of the page's `title`, at its beginning or its end, else the nearest. A
    site's name is not the page's heading: what ends the title and is no more than half of it, or links to another page
    under another name. Nor is what stands in navigation or is hidden.
    """
    elements, heading = tables.elements, np.zeros(len(tables.elements), np.int64)
    for row in range(1, len(elements)):
        # Parents come before their children.
        heading[row] = row if elements[row, f.TAG] == TAG["h1"] else heading[elements[row, f.PARENT]]
    of = heading[tables.blocks[:, f.ELEMENT]]
    if not kept.any() or (of[kept] > 0).any():
        return kept
    first = int(np.flatnonzero(kept)[0])
    words = _plain_words(title)
    best = most = 0
    for row in dict.fromkeys(of[:first][of[:first] > 0].tolist()):
        blocks = np.flatnonzero(of == row)
        own = _plain_words(
            " ".join(
                tables.text[begin:stop].decode("utf-8", "replace")
                for begin, stop in tables.blocks[blocks][:, (f.BEGIN, f.STOP)].tolist()
            )
        )
        begins, ends = words[: len(own)] == own, words[-len(own) :] == own
        is_site = ends and not begins and 2 * len(own) <= len(words)
        is_linked = tables.blocks[blocks, f.LINKED].sum() * 2 > tables.blocks[blocks, f.CHARACTERS].sum()
        if not own or is_site or (is_linked and not begins) or elements[row, f.ALL_EVIDENCE] & _NO_HEADING:
            continue
        agrees = len(own) if begins or ends else 0
        if agrees >= most:
            best, most = row, agrees
    return kept | (of == best) if best else kept


def _plain_words(text: str) -> list[str]:
    """The words of a text in small letters: titles and headings are compared by them."""
    return re.findall(r"\w+", text.casefold())


_NO_HEADING = sum(1 << PLACE_BIT[name] for name in ("nav", "footer", "aside", "form")) | 1 << BIT["hidden"]
"""Evidence that a heading is not the page's."""


def chosen_blocks(tables: PageTables, scores: NDArray[np.floating]) -> NDArray[np.bool_]:
    """The choice among blocks with these scores (logarithms of odds)."""
    EXTRACTION.load("scan")
    characters = tables.blocks[:, f.CHARACTERS].astype(np.float64)
    order = np.argsort(-scores, kind="stable")
    up_to = np.cumsum(characters[order])
    enough = min(_BEST_SHARE * up_to[-1], _BEST_CHARACTERS)
    best = float(scores[order[min(int(np.searchsorted(up_to, enough)), len(order) - 1)]])
    raised = scores + max(0.0, _BEST_SCORE - best)
    gains = np.rint(raised * np.sqrt(characters / _UNIT) * _SCALE).astype(np.int64)
    kept = _least_energy(tables, gains, _SWITCH, _BLOCK_SWITCH)
    # The words of a short page do not outweigh the cost of a switch; its best blocks are kept anyway.
    return kept if kept.any() else _least_energy(tables, gains, 0.0, 0.0)


def _least_energy(
    tables: PageTables, gains: NDArray[np.int64], switch: float, block_switch: float
) -> NDArray[np.bool_]:
    from napkin.extraction.compiled.scan import choose_blocks

    elements, blocks = np.ascontiguousarray(tables.elements), np.ascontiguousarray(tables.blocks)
    kept, costs = gains.copy(), np.empty(2 * len(elements), np.int64)
    choose_blocks(
        elements.ctypes.data,
        len(elements),
        blocks.ctypes.data,
        len(blocks),
        kept.ctypes.data,
        costs.ctypes.data,
        int(switch * _SCALE),
        int(block_switch * _SCALE),
    )
    return kept > 0


@cache
def block_weights() -> NDArray[np.float32]:
    """The weights of the features, in their order."""
    weights = packaged_toml("napkin.extraction", "block_weights.toml", dict[str, float], "weights")
    return np.array([weights[name] for name in NAMES], np.float32)


class NotExtracted(ValueError):
    """A document over a limit, or one that cannot be read: the name of the rule, and what was found."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule, self.detail = rule, detail


def parsed_size(page: bytes, most_elements: int, most_attributes: int) -> tuple[int, int]:
    """Upper bounds of the elements that a parser makes of the page, and of the cost of its attributes.

    Counting ends where either is more than the most that is wanted.
    """
    EXTRACTION.load("parser_cost")
    from napkin.extraction.compiled.parser_cost import N_COUNTERS, parser_cost

    counters, result = np.zeros(N_COUNTERS, np.int64), np.zeros(2, np.int64)
    buffer = np.frombuffer(page + bytes(8), np.uint8)
    parser_cost(
        buffer.ctypes.data, len(page), counters.ctypes.data, result.ctypes.data, most_elements, most_attributes**2
    )
    return int(result[0]), math.isqrt(int(result[1]))


@dataclass(frozen=True)
class HtmlLimits:
    """The most that is read of one page: bytes, elements that a parser would make of it, attributes of a tag.

    Attributes of several tags count as the root of their squares' sum, as a parser takes seconds for them.
    """

    most_bytes: int = 20_000_000
    most_elements: int = 200_000
    most_attributes: int = 10_000


@dataclass(frozen=True)
class ExtractedPage:
    """The text of a page, what it says of itself, and its encoding."""

    text: str
    encoding: str
    metadata: PageMetadata


def extract_html(
    data: bytes,
    *,
    charset: str = "",
    main_content: bool = True,
    heading: bool = True,
    markdown: bool = True,
    limits: HtmlLimits = HtmlLimits(),
) -> ExtractedPage:
    """The text of a page, as it was sent but decompressed, and what it says of itself.

    `charset` is the encoding that the HTTP header declared, if it did. `main_content` leaves out navigation, comments,
    advertising and the like; `heading` begins it with the page's main heading, where that stands apart; `markdown`
    marks headings, lists, tables, quotations and code, else there are paragraphs only.

    Raises NotExtracted for a page over one of the limits, NapkinError where the extra `curation` is not installed.
    """
    if len(data) > limits.most_bytes:
        raise NotExtracted("page bytes", f"{len(data):,} > {limits.most_bytes:,}")
    parser = import_extra("resiliparse.parse.html", "an HTML page")
    text, encoding = decode_page(data, charset)
    utf8 = text.encode("utf-8", "replace")
    elements, attributes = parsed_size(utf8, limits.most_elements, limits.most_attributes)
    if elements > limits.most_elements:
        raise NotExtracted("page elements", f"{elements:,} > {limits.most_elements:,}")
    if attributes > limits.most_attributes:
        raise NotExtracted("attributes of a tag", f"{attributes:,} > {limits.most_attributes:,}")
    page = str(parser.HTMLTree.parse(text))
    tables = page_tables(page.encode("utf-8", "replace"), limits.most_elements)
    if tables is None:
        raise NotExtracted("page elements", f"more than {limits.most_elements:,}")
    metadata = page_metadata(page)
    kept = main_blocks(tables) if main_content else np.ones(len(tables.blocks), bool)
    if main_content and heading:
        kept = with_main_heading(tables, kept, metadata.title)
    return ExtractedPage(render(tables, kept, markdown=markdown, whole=not main_content), encoding, metadata)
