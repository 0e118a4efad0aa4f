"""The counts of a text by machine code are those of plain Python, and those of a few texts are known."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napkin.curation.filters.document_counts import compiled_c4_lines, compiled_statistics, plain_c4_lines
from napkin.curation.filters.text_counts import plain_statistics

PIECES = (
    *("a", "b c", "the", "The,", '"to"', "that…", "1.5", "x" * 40, "of.of", "é", "Ünï", "中文", "かな", "。", "𝒜", "ﬁ"),
    *(
        " ",
        " ",
        " ",
        "\n",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "\u2003",
        "\u2028",
        "\x85",
        "\x1c",
        "\x00",
        "\ud800",
        "\U0010ffff",
    ),
    *(".", "...", "…", "!", '."', "?”", "- ", "• ", "#", "{", "a b c d e f g h i j k ", "Yes. No. "),
    *("Lorem Ipsum", "JavaScript", "terms of use", "Privacy Policy", "cookie policy", "use COOKIES", "use of cookies"),
)
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=120).map("".join)


@pytest.mark.thorough
@given(TEXTS)
@settings(max_examples=120)
def test_machine_code_counts_what_plain_python_counts(text: str) -> None:
    for repetition in ("all", "lines", "none"):
        assert compiled_statistics(text, repetition=repetition) == plain_statistics(text, repetition=repetition)


@given(TEXTS, st.integers(0, 4), st.sampled_from([2, 30, 1000]))
@settings(max_examples=120)
def test_machine_code_keeps_the_lines_that_plain_python_keeps(text: str, least: int, longest: int) -> None:
    assert compiled_c4_lines(text, least, longest) == plain_c4_lines(text, least, longest)


def test_long_texts_of_few_words_repeat_alike() -> None:
    choose = random.Random(0)
    for n_words, vocabulary in ((20_000, 3), (20_000, 60), (5_000, 2000)):
        separators = [" "] * 8 + ["\n", "\n\n"]
        text = "".join(f"w{choose.randrange(vocabulary)}{choose.choice(separators)}" for _ in range(n_words))
        for repetition in ("all", "lines"):
            assert compiled_statistics(text, repetition=repetition) == plain_statistics(text, repetition=repetition)


def test_a_text_that_says_all_twice() -> None:
    sentence = " ".join(f"word{i:02}" for i in range(20))
    counts = plain_statistics(f"{sentence}\n\n{sentence}")
    assert (counts.words, counts.lines, counts.paragraphs) == (40, 2, 2)
    assert (counts.repeated_lines, counts.repeated_paragraphs) == (1, 1)
    assert counts.repeated_line_characters == counts.repeated_paragraph_characters == len(sentence)
    # Each n-gram that does not cross the lines stands twice: the second time, all 20 words of 6 characters are covered.
    assert set(counts.repeated_n_gram_characters.values()) == {120}
    assert counts.top_n_gram_characters == {2: 2 * 13, 3: 2 * 20, 4: 2 * 27}


def test_signs_and_lines_are_counted() -> None:
    counts = plain_statistics("- one # two...\n  \n• Three The to.\nno end…\n")
    assert (counts.hashes, counts.ellipses, counts.bullet_lines, counts.ellipsis_lines) == (1, 2, 2, 2)
    assert (counts.lines, counts.paragraphs, counts.terminated_lines, counts.short_lines) == (3, 2, 2, 3)
    assert (counts.words, counts.alphabetic_words, counts.stop_words) == (10, 7, 2)


@pytest.mark.parametrize("size", [0, 1, 2**16 - 1, 2**16, 2**22, 2**22 + 1])
def test_texts_of_any_size_fit(size: int) -> None:
    text = ("a b\n" * (size // 4 + 1))[:size]
    counts = compiled_statistics(text)
    assert counts.characters == size
    assert counts.words == len(text.split())
    assert counts.lines == len(text.split("\n")) - text.endswith("\n") - (not text)


def test_threads_count_alike() -> None:
    choose = random.Random(1)
    texts = [" ".join(str(choose.randrange(50)) for _ in range(choose.randrange(2000))) for _ in range(40)]
    expected = [compiled_statistics(text) for text in texts]
    found: list[list[object]] = []

    def count() -> None:
        found.append([compiled_statistics(text) for text in texts])

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4
