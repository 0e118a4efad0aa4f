"""What is measured of each block of text, from which its chance to be main content is computed."""

import numpy as np
from numpy.typing import NDArray

from napkin.curation.extraction.compiled import fields as f
from napkin.curation.extraction.evidence import PATTERNS
from napkin.curation.extraction.page_tables import PageTables
from napkin.curation.extraction.tags import FIRST_PLACE, PLACES, TAG

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
    """Of each block a row of numbers of about -1 to 1, named by `NAMES`."""
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
    near = (length, linked, sentence, marks)
    for i in (-2, -1, 1, 2):
        for values in near:
            moved = np.zeros(n, np.float32)
            if i < 0:
                moved[-i:] = values[:i]
            else:
                moved[:-i] = values[i:]
            columns.append(moved)
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
