"""Lists of words and hosts, and RefinedWeb's kinds of lines."""

from pathlib import Path

import pytest

from napkin.curation import Dropped, Record
from napkin.curation.filters import HostList, RefinedWeb, WordList
from napkin.curation.filters.web_rules import line_defect
from napkin.errors import NapkinError


@pytest.fixture
def words(tmp_path: Path) -> str:
    file = tmp_path / "bad.txt"
    file.write_text("# a comment\nDarn\nthree little words  # a phrase\n\nstraße\n", encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("darn!", "darn"),
        ("Three, little\nwords", "three little words"),
        ("auf der STRAßE", "straße"),
        ("darning three little other words", ""),
    ],
)
def test_words_and_phrases_of_a_list_drop_documents(words: str, text: str, found: str) -> None:
    result = WordList(words).apply(Record("x#0", text))
    assert (result.detail if isinstance(result, Dropped) else "") == found
    assert isinstance(WordList(words, max_matches=1).apply(Record("x#0", text)), Record)


@pytest.mark.parametrize(
    ("address", "listed"),
    [
        ("https://example.org/a", True),
        ("http://www.Example.ORG:8080", True),
        ("https://notexample.org", False),
        ("https://example.org.evil.com", False),
        ("https://host.net/blog/post", True),
        ("https://host.net/blogs", False),
        ("https://host.net/", False),
        ("http://ads.net/x", True),
        ("not an address", False),
        ("http://[bad", False),
        ("", False),
    ],
)
def test_hosts_of_a_list_drop_documents(tmp_path: Path, address: str, listed: bool) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text("example.org\nhttps://host.net/blog/\n0.0.0.0 ads.net\n*.wild.com\n")
    record = Record("x#0", "text", address=address)
    assert isinstance(HostList(str(file)).apply(record), Dropped) == listed
    assert isinstance(HostList(str(file), keep=True).apply(record), Dropped) != listed


def test_lists_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("# nothing\n")
    latin = tmp_path / "latin.txt"
    latin.write_bytes("é".encode("latin-1"))
    for file, why in ((empty, "has no entries"), (latin, "not UTF-8"), (tmp_path / "none.txt", "No such file")):
        with pytest.raises(NapkinError, match=why):
            WordList(str(file))


@pytest.mark.parametrize(
    ("line", "defect"),
    [
        ("THE LATEST NEWS OF today", "upper case"),
        ("1,234 | 5.6", "numbers only"),
        ("3 likes", "counter"),
        ("· 1.2K followers ·", "counter"),
        ("Share", "one word"),
        ("Sign in to comment", "button or menu"),
        ("A story of the sea. Read more...", "button or menu"),
        ("3 items in cart", "button or menu"),
        ("The NATO met in Rome in 1990.", ""),
        ("3 men in a boat", ""),
        ("You can read more about it in the long article of last week", ""),
    ],
)
def test_kinds_of_lines(line: str, defect: str) -> None:
    assert line_defect(line) == defect


def test_few_lines_are_removed_and_many_drop_the_document() -> None:
    prose = "\n".join(["This is a sentence of ten words in one line."] * 10)
    record = Record("x#0", f"Home\n{prose}\n\n3 likes")
    assert RefinedWeb().apply(record) is record
    assert record.text == f"{prose}\n"
    assert record.trace[-1].note == "lines removed: counter: 1, one word: 1"
    menu = Record("x#0", f"{prose}\nHome\nNews\nAbout\nContact\nSearch\nLogin")
    assert RefinedWeb().apply(menu) == Dropped("words in removed lines", "0.0566 > 0.05")
    assert isinstance(RefinedWeb(max_removed_words=1).apply(menu), Record)
