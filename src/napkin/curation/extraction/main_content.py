"""Which blocks of a page are its main content: a score for each, then a choice that hangs together.

The score is the logarithm of odds that logistic regression gives a block, from what `block_features.py` measures of it.
The weights were fitted by `benchmarks/curation_extraction.py --fit` on half of the pages of a published benchmark.
"""

import re
import tomllib
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from napkin.curation.extraction.block_features import NAMES, block_features
from napkin.curation.extraction.compiled import fields as f
from napkin.curation.extraction.compiled.loading import EXTRACTION
from napkin.curation.extraction.evidence import BIT
from napkin.curation.extraction.page_tables import PageTables
from napkin.curation.extraction.tags import PLACE_BIT, TAG

_BEST_SHARE = 0.1
_BEST_CHARACTERS = 300.0
"""Each page has something to say: its best blocks, with this share of its text or, if less, so many characters,"""
_BEST_SCORE = 1.0
"""have at least this score; where they do not, all scores are raised by the same amount."""
_SWITCH, _BLOCK_SWITCH = 1.5, 0.6
"""What it costs that an element, or a block, differs from what is around it, in units of a score times a length."""
_UNIT = 100.0
"""A block of so many characters counts once; others by the square root of their length."""
_SCALE = 1024
"""Energies are integers, so that they are the same on every machine."""


def main_blocks(tables: PageTables) -> NDArray[np.bool_]:
    """Whether each block belongs to the main content; of repeated texts the first does."""
    if not len(tables.blocks):
        return np.zeros(0, bool)
    return chosen_blocks(tables, block_features(tables) @ block_weights())


def with_main_heading(tables: PageTables, kept: NDArray[np.bool_], title: str) -> NDArray[np.bool_]:
    """The blocks that are kept, and the page's main heading where it stands apart: an `h1` before the first of them.

    Of several the one that the page's `title` repeats, else the nearest. A site's name is not the page's heading: what
    only ends the title, or links to another page under another name. Nor is what stands in navigation or is hidden.
    """
    elements, heading = tables.elements, np.zeros(len(tables.elements), np.int64)
    for row in range(1, len(elements)):
        # Parents stand before their children.
        heading[row] = row if elements[row, f.TAG] == TAG["h1"] else heading[elements[row, f.PARENT]]
    of = heading[tables.blocks[:, f.ELEMENT]]
    if not kept.any() or (of[kept] > 0).any():
        return kept
    first = int(np.flatnonzero(kept)[0])
    words = _plain_words(title)
    best, best_agrees = 0, False
    for row in dict.fromkeys(of[:first][of[:first] > 0].tolist()):
        blocks = np.flatnonzero(of == row)
        text = "".join(
            tables.text[begin:stop].decode("utf-8", "replace") + " " for begin, stop in _texts(tables, blocks)
        )
        own = _plain_words(text)
        begins = bool(own) and words.startswith(own)
        is_linked = tables.blocks[blocks, f.LINKED].sum() * 2 > tables.blocks[blocks, f.CHARACTERS].sum()
        is_site = bool(own) and words.endswith(own) and not begins
        if not own or is_site or (is_linked and not begins) or elements[row, f.ALL_EVIDENCE] & _NO_HEADING:
            continue
        if begins or not best_agrees:
            best, best_agrees = row, begins
    return kept | (of == best) if best else kept


def _texts(tables: PageTables, blocks: NDArray[np.intp]) -> list[list[int]]:
    return tables.blocks[blocks][:, (f.BEGIN, f.STOP)].tolist()


def _plain_words(text: str) -> str:
    """A text in small letters, without marks: titles and headings are compared by it."""
    return " ".join(re.findall(r"\w+", text.casefold()))


_NO_HEADING = sum(1 << PLACE_BIT[name] for name in ("nav", "footer", "aside", "form")) | 1 << BIT["hidden"]
"""Evidence that a heading is not the page's."""


def chosen_blocks(tables: PageTables, scores: NDArray[np.floating]) -> NDArray[np.bool_]:
    """The choice among blocks with these scores (logarithms of odds)."""
    EXTRACTION.load("choice")
    characters = tables.blocks[:, f.CHARACTERS].astype(np.float64)
    order = np.argsort(-scores, kind="stable")
    up_to = np.cumsum(characters[order])
    enough = min(_BEST_SHARE * up_to[-1], _BEST_CHARACTERS)
    best = float(scores[order[min(int(np.searchsorted(up_to, enough)), len(order) - 1)]])
    raised = scores + max(0.0, _BEST_SCORE - best)
    gains = np.rint(raised * np.sqrt(characters / _UNIT) * _SCALE).astype(np.int64)
    kept = _least_energy(tables, gains, _SWITCH, _BLOCK_SWITCH)
    # A page of few words is worth no switch; its best ones are kept all the same.
    return kept if kept.any() else _least_energy(tables, gains, 0.0, 0.0)


def _least_energy(
    tables: PageTables, gains: NDArray[np.int64], switch: float, block_switch: float
) -> NDArray[np.bool_]:
    from napkin.curation.extraction.compiled.choice import choose_blocks

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
    weights = tomllib.loads(files("napkin.curation.extraction").joinpath("block_weights.toml").read_text())["weights"]
    return np.array([weights[name] for name in NAMES], np.float32)
