"""datatrove's filters, with our thresholds, on texts in which both find the same words."""

import random
from collections import Counter
from typing import Any

import pytest

from napkin.curation.filters import FineWeb, Gopher, GopherRepetition
from peers import peer

pytestmark = pytest.mark.peers

WORDS = "the be to of and that have with river stone lantern quiet morning window letters paper winter garden".split()


def some_text(seed: int, ends: tuple[str, ...]) -> str:
    """Lines of plain words and numbers, some lines repeated; each line ends in one of ends."""
    draw = random.Random(seed)
    repeated, numbers, ended = draw.random() * 0.6, draw.random() * 0.4, draw.random()
    vocabulary = WORDS[: draw.choice((6, 12, 18))]
    lines: list[str] = []
    for _ in range(draw.randrange(6, 40)):
        if lines and draw.random() < repeated:
            lines.append(draw.choice(lines))
            continue
        count = draw.choice((draw.randrange(1, 6), draw.randrange(6, 25)))
        words = [
            str(draw.randrange(10**4)) if draw.random() < numbers else draw.choice(vocabulary) for _ in range(count)
        ]
        lines.append(" ".join(words) + (draw.choice(ends) if draw.random() < ended else ""))
    return "\n".join(lines)


def drops(filters: Any, text: str) -> bool:
    try:
        return filters.filter(peer("datatrove.data").Document(text=text, id="x")) is not True
    except ZeroDivisionError:
        # A text without words for datatrove, which divides by their number.
        return True


PACKAGE = "datatrove.pipeline.filters."
# datatrove takes marks of punctuation out of its words and their number, which only FineWeb's rules do not count.
CASES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "gopher": (Gopher(), lambda: peer(PACKAGE + "gopher_quality_filter").GopherQualityFilter(), ("",)),
    "gopher-repetition": (
        GopherRepetition(),
        lambda: peer(PACKAGE + "gopher_repetition_filter").GopherRepetitionFilter(),
        ("",),
    ),
    "fineweb": (
        FineWeb(max_repeated_line_characters=0.1),
        lambda: peer(PACKAGE + "fineweb_quality_filter").FineWebQualityFilter(char_duplicates_ratio=0.1),
        (" .", " !", " ,"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_text_is_dropped_where_datatrove_drops_it(name: str) -> None:
    ours, theirs, ends = CASES[name]
    texts = [some_text(seed, ends) for seed in range(300)]
    filters = theirs()
    expected = [drops(filters, text) for text in texts]
    assert 30 < sum(expected) < 290
    # Runs of words that several lines share are measured from other ends: a few texts at a threshold differ.
    agree = [bool(ours.failing_rules(text)) == theirs for text, theirs in zip(texts, expected, strict=True)]
    assert sum(agree) >= 0.97 * len(texts)


def test_fineweb_with_the_options_of_its_code_decides_as_datatrove_does() -> None:
    draw = random.Random(3)
    rules = {"line_punct_ratio": "lines without punctuation", "short_line_ratio": "short lines"}
    rules |= {"char_dup_ratio": "characters of repeated lines", "list_ratio": "line feeds per word"}
    theirs, ours = (
        peer(PACKAGE + "fineweb_quality_filter").FineWebQualityFilter(),
        FineWeb(max_repeated_line_characters=0.01, max_line_feeds_per_word=0.3),
    )
    # Words without punctuation are the same words; a line of exactly 30 characters is short to datatrove alone.
    pool = [" ".join(draw.choices(["red", "green", "yellow"], k=draw.randrange(1, 16))) for _ in range(90)]
    pool = [line + draw.choice(["", "", " ."]) for line in pool if len(line) not in (28, 30)]
    seen = Counter[str]()
    for number in range(400):
        text = "\n".join(draw.sample(pool, draw.randrange(2, 30)) + draw.choices(pool, k=number % 3))
        result = theirs.filter(peer("datatrove.data").Document(text=text, id="x"))
        expected = [] if result is True else [rules[result[1]]]
        failing = ours.failing_rules(text)
        seen.update(expected)
        assert bool(failing) == bool(expected)
        assert set(expected) <= set(failing)
    assert len(seen) >= 3
