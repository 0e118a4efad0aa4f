"""Each published rule drops a text just beyond its threshold, and lets go one just within."""

import pytest

from napkin.curation import Dropped, Record
from napkin.curation.filters import C4, FineWeb, Gopher, GopherRepetition
from napkin.errors import NapkinError

STOPS = "the of "
PROSE = "the long lines of many words without all symbols"


def words(n: int, word: str = "word") -> str:
    return STOPS + " ".join([word] * (n - 2))


def distinct(n: int) -> str:
    return STOPS + " ".join(f"word{i}" for i in range(n - 2))


def rule_of(stage: Gopher | GopherRepetition | FineWeb | C4, text: str) -> str:
    result = stage.apply(Record("x#0", text))
    return result.rule if isinstance(result, Dropped) else ""


@pytest.mark.parametrize(
    ("rule", "within", "beyond"),
    [
        ("too few words", words(50), words(49)),
        ("too many words", words(100_000, "abc"), words(100_001, "abc")),
        # Two stop words of 3 and 2 letters: mean lengths of 3 and just below, 10 and just above.
        ("short words", "the of " + "abcd " + "abc " * 60, "the of " + "abc " * 60),
        ("long words", "the of " + "abcdefghij " * 62, "the of " + "abcdefghij " * 60 + "abcdefghijabcdefghi " * 2),
        ("hash signs", words(60) + "######", words(60) + "#######"),
        ("ellipses", words(60) + "..." * 5 + "…", words(60) + "..." * 6 + "…"),
        ("bullet points", "\n".join([f"- {PROSE}"] * 9 + [PROSE]), "\n".join([f"• {PROSE}"] * 10 + [PROSE])),
        (
            "lines end in ellipses",
            "\n".join([f"{PROSE} at last…"] * 3 + [f"{PROSE} in it"] * 7),
            "\n".join([f"{PROSE} at last..."] * 4 + [f"{PROSE} in it"] * 6),
        ),
        ("words without letters", words(80) + " 1234" * 20, words(80) + " 1234" * 21),
        ("few stop words", "the of " + "word " * 60, "the The " + "word " * 60),
    ],
)
def test_gophers_rules_of_quality(rule: str, within: str, beyond: str) -> None:
    assert rule_of(Gopher(), beyond) == rule
    assert rule not in Gopher().failing_rules(within)


def test_gophers_rules_of_repetition() -> None:
    def lines(repeated: int, total: int, separator: str) -> str:
        return separator.join(
            ["abc"] * (repeated + 1) + [f"much longer line number {i}" for i in range(total - repeated - 1)]
        )

    stage = GopherRepetition()
    assert stage.failing_rules(distinct(1000)) == []
    assert "repeated lines" not in stage.failing_rules(lines(3, 10, "\n"))
    assert rule_of(stage, lines(4, 10, "\n")) == "repeated lines"
    assert "repeated paragraphs" not in stage.failing_rules(lines(3, 10, "\n\n"))
    assert "repeated paragraphs" in stage.failing_rules(lines(4, 10, "\n\n"))


@pytest.mark.parametrize(("n", "percent"), [(5, 15), (6, 14), (7, 13), (8, 12), (9, 11), (10, 10)])
def test_duplicate_n_grams_are_counted_by_their_characters(n: int, percent: int) -> None:
    def text(total: int) -> str:
        # n words of 9 characters stand twice; the other words, of 9 characters too, once. Without spaces between
        # words the fraction would be n / total: the spaces make it 9 n / (10 total - 1).
        gram = [f"repeat{i:03}" for i in range(n)]
        others = [f"single{i:03}" for i in range(total - 2 * n)]
        return " ".join([*gram, *others, *gram])

    stage, rule = GopherRepetition(), f"duplicate {n}-grams"
    most = next(total for total in range(2 * n, 1000) if 9 * n <= percent / 100 * (10 * total - 1))
    assert rule not in stage.failing_rules(text(most))
    assert rule in stage.failing_rules(text(most - 1))


def test_the_most_frequent_n_gram_is_counted_with_its_spaces() -> None:
    # `ab cd` stands k times between words that are never repeated.
    stage = GopherRepetition()
    text = " ".join(f"ab cd other{i:013}" for i in range(20))
    fraction = 20 * len("ab cd") / len(text)
    assert ("most frequent 2-gram" in stage.failing_rules(text)) == (fraction > 0.2)
    shorter = text.replace("000000", "")
    assert 20 * len("ab cd") / len(shorter) > 0.2
    assert "most frequent 2-gram" in stage.failing_rules(shorter)


def test_finewebs_rules() -> None:
    long, short = "a line of more than thirty characters", "a short line"

    def of(n_long: int, n_short: int, n_ended: int) -> str:
        made = [f"{long} {i}" for i in range(n_long)] + [f"{short} {i}" for i in range(n_short)]
        return "\n".join(line + "." * (i < n_ended) for i, line in enumerate(made))

    assert rule_of(FineWeb(), of(100, 0, 13)) == ""
    assert rule_of(FineWeb(), of(100, 0, 12)) == "lines without punctuation"
    assert rule_of(FineWeb(), of(34, 66, 100)) == ""
    assert rule_of(FineWeb(), of(33, 67, 100)) == "short lines"
    repeated = [f"{long} number {i}." for i in range(10, 19)]
    assert rule_of(FineWeb(), "\n".join([*repeated, repeated[0]])) == "characters of repeated lines"
    assert rule_of(FineWeb(), "\n".join([*repeated, f"{long} number 19.", repeated[0]])) == ""


def test_fineweb_has_the_thresholds_of_its_paper_and_as_options_those_of_its_code() -> None:
    line = "a line of prose that has more than thirty characters number"
    lines = [f"{line} {i}." for i in range(100, 200)]
    for repeated, paper, code in ((0, "", ""), (1, "", ""), (2, "", "characters of repeated lines")):
        text = "\n".join([*lines, *lines[:repeated]])
        assert rule_of(FineWeb(), text) == paper
        assert rule_of(FineWeb(max_repeated_line_characters=0.01), text) == code
    # 7 words and 3 or 2 line feeds: 0.43 and 0.29 per word.
    listed = "one two\nthree four\nfive six\nseven."
    alone = {"max_line_feeds_per_word": 0.3, "min_terminated_lines": 0.0, "max_short_lines": 1.0}
    alone |= {"max_repeated_line_characters": 1.0}
    for text, rules in ((listed, ["line feeds per word"]), (listed.replace("\n", " ", 1), [])):
        for padding in ("", 100 * (" \n" if rules else " ")):
            failing = FineWeb(**alone).failing_rules(text + padding)
            assert [rule for rule in failing if rule == "line feeds per word"] == rules
    assert "line feeds per word" not in FineWeb().failing_rules(listed)
    with pytest.raises(NapkinError, match=r"max_line_feeds_per_word.*-1"):
        FineWeb(max_line_feeds_per_word=-1.0)


SENTENCES = "\n".join(f"This is sentence number {i}." for i in range(5))


def test_c4_keeps_lines_that_are_sentences() -> None:
    text = f"""Menu

{SENTENCES}
Two words.
This page needs JavaScript to run.
By visiting you agree to our Terms of Use.
  He said "no".\t
And so on...
"""
    record = Record("x#0", text)
    assert C4().apply(record) is record
    assert record.text == SENTENCES + '\nHe said "no".'
    reasons = "no punctuation at the end: 2, few words: 1, javascript: 1, policy: 1"
    assert record.trace[-1].note == f"lines removed: {reasons}"


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("too few sentences", SENTENCES.rpartition("\n")[0]),
        ("lorem ipsum", f"{SENTENCES}\nLorem Ipsum dolor sit amet."),
        ("curly bracket", SENTENCES + "\nThat is how {braces} look."),
    ],
)
def test_c4_drops_whole_documents(rule: str, text: str) -> None:
    assert rule_of(C4(), text) == rule


def test_sentences_of_one_line_are_counted() -> None:
    line = "Dr. Who came. He went! “Why?” No one knows, e.g. not even me. That is all."
    assert rule_of(C4(min_sentences=6), line) == ""
    assert rule_of(C4(min_sentences=7), line) == "too few sentences"


def test_thresholds_are_checked() -> None:
    with pytest.raises(NapkinError, match=r"max_short_lines.*1.5: use.*0.*1"):
        FineWeb(max_short_lines=1.5)
    with pytest.raises(NapkinError, match=r"min_words is -1"):
        Gopher(min_words=-1)
