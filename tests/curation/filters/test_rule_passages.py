"""The passages that a reader is shown are those that the rules count: beside the counts, on random texts."""

import itertools
import random

import pytest

from napkin.curation.filters.rule_passages import passages_of
from napkin.curation.filters.text_counts import WORD, plain_statistics

LINES = [
    "a b",
    "c d e f g h i.",
    "- item",
    "# 12 34",
    "and so on ...",
    "",
    "  a b ",
    "the cat sat on the mat…",
    "名前 12.",
]


def random_text(seed: int) -> str:
    draw = random.Random(seed)
    words = " ".join(draw.choices(["one", "two", "12", "three,", "#"], k=draw.randint(0, 60)))
    return "\n".join([*draw.choices(LINES, k=draw.randint(0, 40)), words, *draw.choices(LINES, k=5)])


@pytest.mark.parametrize("seed", range(40))
def test_passages_are_what_the_rules_count(seed: int) -> None:
    text = random_text(seed)
    counts = plain_statistics(text)

    def marked(rule: str) -> list[str]:
        passages = passages_of(rule, "", text)
        assert passages == sorted(passages)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(passages))
        return [text[begin:end] for begin, end in passages]

    lines = marked("repeated lines")
    assert len(lines) == counts.repeated_lines
    assert sum(map(len, lines)) == counts.repeated_line_characters
    assert sum(map(len, marked("repeated paragraphs"))) == counts.repeated_paragraph_characters
    assert sum(map(len, marked("hash signs"))) == counts.hashes
    assert len(marked("ellipses")) == counts.ellipses
    assert len(marked("bullet points")) == counts.bullet_lines
    assert len(marked("lines end in ellipses")) == counts.ellipsis_lines
    assert len(marked("lines without punctuation")) == counts.lines - counts.terminated_lines
    assert len(marked("short lines")) == counts.short_lines
    assert len(marked("words without letters")) == counts.words - counts.alphabetic_words
    for n, characters in counts.repeated_n_gram_characters.items():
        words = [word for passage in marked(f"duplicate {n}-grams") for word in WORD.findall(passage)]
        assert sum(map(len, words)) == characters
    for n, characters in counts.top_n_gram_characters.items():
        assert bool(marked(f"most frequent {n}-gram")) == (characters > 0)


def test_what_a_rule_saw_is_marked_exactly() -> None:
    def marked(rule: str, text: str, detail: str = "") -> list[str]:
        return [text[begin:end] for begin, end in passages_of(rule, detail, text)]

    assert marked("most frequent 2-gram", "to be or not to be or x to be") == ["to be", "to be", "to be"]
    assert marked("lorem ipsum", "A Lorem Ipsum dolor.") == ["Lorem Ipsum"]
    assert marked("words of bad.txt", "Well, DAMN it, damned.", "damn, hell") == ["DAMN"]
    assert marked("words in removed lines", "A line of prose stays here.\n3 likes\n") == ["3 likes"]
    assert marked("", "Write to <EMAIL> or <PHONE>.") == ["<EMAIL>", "<PHONE>"]
    assert marked("too short", "a text") == []
