"""No regular expression of a tokenizer file takes all of the time or memory, when it is compiled or when it is run."""

import json
from pathlib import Path

import pytest

from napkin.errors import NapkinError
from napkin.tokenizer import pre_tokenization
from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.interchange.huggingface import read_huggingface, write_huggingface
from napkin.tokenizer.pre_tokenization import PATTERNS, PreTokenizer

ENDLESS = r"(a|aa)+(?![a!])"
TEXT = "a" * 60 + "!"

# Refused before they are compiled.
TOO_LARGE = [
    "((a{1000}){1000})",
    "(((a{1000}){1000}){1000}){1000}",
    "(?:a{0,65535}){0,65535}",
    r"\p{L}{1,1000000000}",
    "(?:a?){1000000000}b",
    "(?:a?){,1000000000}b",
    "a{99999999999999999999}",
    "|".join(f"ab{i}" for i in range(300_000)),
    "|".join("ab"[i % 2] for i in range(3000)),
    "(" * 5000 + ")" * 5000,
    "[" * 99_999,
]
# Where a scanner that mistakes the end of a class, a comment or an escape would not see the repeats.
HIDDEN = [r"[[]", "[{]}", "[]]", "[^]]", r"[\]]", "[[:alpha:]]", "(?#[)", r"\[", r"\\", "[:", "(?i)", "[]{5}]"]
UNSUPPORTED = [
    "(?R)?a",
    "(?<x>(?1)?a)",
    "((?-1)?a)",
    "(?<x>(?&x)?a)",
    "(?P<x>(?P>x)?a)",
    "(?:abc){e}",
    "(?:abc){1<=e<=2}",
    "(?:abc){i<=2,d<=1}",
    "(?x)# [ \n((a{1000}){1000})",
    "(?V1)[[a-z]--[b]]",
    "(?ix:a)",
]


@pytest.mark.parametrize(
    "pattern", [*TOO_LARGE, *(begin + TOO_LARGE[0] for begin in HIDDEN), *UNSUPPORTED], ids=lambda pattern: pattern[:30]
)
def test_an_expression_beyond_the_bounds_is_refused_in_a_short_line(pattern: str) -> None:
    with pytest.raises(NapkinError, match=r"^the pattern .*: use") as refused:
        PreTokenizer(pattern)
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "pattern", ["(", "[a", "\\", "(?", "a{2}{3}", "(?<n>a", r"\L<words>", "(?(1)a|b)", r"\p{Nope}"]
)
def test_what_is_no_expression_is_refused_in_a_line(pattern: str) -> None:
    with pytest.raises(NapkinError, match="is not a regular expression"):
        PreTokenizer(pattern)


def test_a_search_without_end_ends_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pre_tokenization, "SECONDS", 0.2)
    with pytest.raises(NapkinError, match=r"much.*61 characters") as refused:
        list(PreTokenizer(ENDLESS).split(TEXT))
    assert "\n" not in str(refused.value)
    with pytest.raises(NapkinError, match="takes too much time"):
        BPETokenizer([], pattern=ENDLESS).encode(TEXT)


def test_a_search_without_end_of_a_foreign_tokenizer_ends_in_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pre_tokenization, "SECONDS", 0.2)
    write_huggingface(BPETokenizer([(97, 97)], pattern="[a-z]+"), tmp_path / "tokenizer.json")
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    splits = document["pre_tokenizer"]["pretokenizers"]
    for pattern, line in (
        (ENDLESS, "takes too much time"),
        ("((a{1000}){1000})", "repeats"),
        ("(?R)?a", "differently"),
    ):
        splits[0]["pattern"] = {"Regex": pattern}
        (tmp_path / "foreign.json").write_text(json.dumps(document))
        with pytest.raises(NapkinError, match=line):
            read_huggingface(tmp_path / "foreign.json").encode(TEXT)


def test_expressions_of_real_tokenizers_are_within_the_bounds() -> None:
    han = "".join(rf"\x{code:02x}" for code in range(64))
    for pattern in (*PATTERNS.values(), rf"[{han}]+|\p{{N}}{{1,3}}|[^\r\n\p{{L}}]?\p{{L}}+|\s+(?!\S)|(?i:'s|'t)"):
        assert "".join(PreTokenizer(pattern).split("it's  42 cats!")) == "it's  42 cats!"


@pytest.mark.parametrize("pattern", ["[0-9]+", "b*", "", "(?r)[a-c]", "(?<=a)b|$", "^|b"])
def test_the_pieces_join_to_the_text_whatever_the_pattern_matches(pattern: str) -> None:
    pieces = list(PreTokenizer(pattern).split("abc 12 cba\n"))
    assert "".join(pieces) == "abc 12 cba\n"
    assert "" not in pieces
