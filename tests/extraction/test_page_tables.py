"""The tables of a page beside the parser's own tree, and the choice among blocks beside all choices."""

import itertools
import random
import re
from html import unescape

import numpy as np
from resiliparse.parse.html import HTMLTree

from napkin.extraction.compiled import fields as f
from napkin.extraction.html_page import chosen_blocks
from napkin.extraction.rendering import PageTables, page_tables
from napkin.extraction.tags import NAMES, PATTERNS

# Phrases, empty elements, and those of which no text is read.
_NOT_ROWS = frozenset(["b", "br", "script", "style"])


def _tables(html: str) -> PageTables:
    tables = page_tables(str(HTMLTree.parse(html)).encode(), 10**5)
    assert tables is not None
    return tables


def test_blocks_have_the_text_and_the_elements_that_the_parsers_tree_has() -> None:
    choices = random.Random(3)
    parts = [
        "<div>",
        "</div>",
        "<p>",
        "</p>",
        "<b>",
        "</b>",
        " ",
        "<ul><li>",
        "</ul>",
        "wörd",
        "a, b.",
        "&amp;",
        "<br>",
    ]
    parts += [
        "<script>if (a<b) '</p>'</script>",
        "<!-- <p>no</p> -->",
        "<style>p>a{}</style>",
        "<td>",
        "<table><tr><td>",
    ]
    for _ in range(60):
        html = "".join(choices.choices(parts, k=choices.randrange(80)))
        tables = _tables(html)
        tree = HTMLTree.parse(html)
        assert tree.document is not None
        # Removing nodes from the tree would be simpler, but crashes the parser's library on some pages.
        text = re.sub(r"<(script|style)>.*?</\1>|<!--.*?-->|<[^>]*>", "", str(tree), flags=re.DOTALL)
        assert "".join(tables.text.decode().split()) == "".join(unescape(text).split())
        wanted = [node.tag for node in tree.document.query_selector_all("*").values() if node.tag not in _NOT_ROWS]
        assert [NAMES[tag] for tag in tables.elements[1:, f.TAG]] == wanted
        sums = tables.elements[0]
        assert sums[f.SUM_CHARACTERS] == tables.blocks[:, f.CHARACTERS].sum()
        assert sums[f.SUM_BLOCKS] == len(tables.blocks)


def test_words_marks_and_links_of_a_block_are_counted() -> None:
    tables = _tables("<p>Dr. Ann said, <a href=x>on  <b>7 May</b></a>\n: no!</p>")
    block = tables.blocks[0]
    assert tables.text == b"Dr. Ann said, on 7 May : no!"
    assert block[f.CHARACTERS] == len(tables.text)
    assert (block[f.WORDS], block[f.MARKS], block[f.DIGITS], block[f.CAPITALS]) == (8, 3, 1, 3)
    assert block[f.LINKS] == 1
    assert 6 <= block[f.LINKED] <= 9
    assert 5 <= block[f.BOLD] <= 6
    assert block[f.IS_SENTENCE] == 1


def test_names_are_evidence_word_by_word() -> None:
    def evidence(attributes: str) -> set[str]:
        element = _tables(f"<div><section {attributes}>x</section></div>").elements[-1]
        return {name for bit, name in enumerate(PATTERNS) if element[f.EVIDENCE] >> bit & 1}

    assert evidence('class="relatedPosts"') >= {"related"}
    assert evidence('id="user_comments"') == {"comment"}
    assert evidence('class="sidebar right"') == {"sidebar"}
    assert evidence('itemprop="articleBody"') >= {"article body"}
    assert evidence('class="adipose navy canvas"') == set()
    assert evidence('style="color:red; display: none"') == {"hidden"}
    assert evidence("hidden") == {"hidden"}
    assert evidence('data-x="comments"') == set()


def test_the_choice_has_the_least_energy_of_all_choices() -> None:
    rng = np.random.default_rng(7)
    for _ in range(40):
        n_elements, n_blocks = int(rng.integers(2, 6)), int(rng.integers(1, 6))
        elements = np.zeros((n_elements, f.N_ELEMENT), np.int64)
        for row in range(1, n_elements):
            elements[row, f.PARENT] = rng.integers(0, row)
        blocks = np.zeros((n_blocks, f.N_BLOCK), np.int64)
        blocks[:, f.ELEMENT] = np.sort(rng.integers(0, n_elements, n_blocks))
        blocks[:, f.CHARACTERS] = 100
        # Large enough that scores are not raised.
        scores = rng.normal(0, 1.5, n_blocks)
        scores[0] = 3

        def energy(
            labels: tuple[int, ...],
            kept: tuple[int, ...],
            scores: np.ndarray = scores,
            elements: np.ndarray = elements,
            blocks: np.ndarray = blocks,
        ) -> float:
            switches = sum(labels[row] != labels[elements[row, f.PARENT]] for row in range(1, len(labels)))
            apart = sum(labels[blocks[k, f.ELEMENT]] != kept[k] for k in range(len(kept)))
            return 1.5 * switches + 0.6 * apart - float(scores @ np.array(kept))

        least = min(
            (energy((0, *labels), kept), kept)
            for labels in itertools.product((0, 1), repeat=n_elements - 1)
            for kept in itertools.product((0, 1), repeat=n_blocks)
        )
        chosen = tuple(int(k) for k in chosen_blocks(PageTables(b"", elements, blocks), scores))
        best_of_chosen = min(
            energy((0, *labels), chosen) for labels in itertools.product((0, 1), repeat=n_elements - 1)
        )
        assert abs(best_of_chosen - least[0]) < 0.01
