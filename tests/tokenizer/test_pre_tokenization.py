"""Pre-tokenization against a scanner written by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin.errors import NapkinError
from napkin.tokenizer.pre_tokenization import PATTERNS, PreTokenizer
from oracles.naive_bpe import naive_gpt2_pieces

# Characters that Python's Unicode does not know yet may have a class in another, newer edition.
ASSIGNED = st.text(st.characters(exclude_categories=["Cs", "Cn"]))
TRICKY = st.text(alphabet="'sdmtlvreST aé19½Ⅳ.,_-\t\n\r\x1c\x85\u00a0\u3000\u0301你🌍", max_size=30)


@given(ASSIGNED | TRICKY)
def test_gpt2_pieces_equal_those_cut_by_hand(text: str):
    assert list(PreTokenizer("gpt2").split(text)) == naive_gpt2_pieces(text)


@given(st.text() | TRICKY, st.sampled_from([*PATTERNS, "", "x*", "[a-z]+", r"\s\K\S", "(?r)[a-z]+", "(s)|(t)"]))
def test_pieces_of_every_pattern_join_to_the_text_and_are_never_empty(text: str, pattern: str):
    pieces = list(PreTokenizer(pattern).split(text))

    assert "".join(pieces) == text
    assert "" not in pieces


def test_gpt2_keeps_contractions_words_numbers_and_signs_apart_and_gives_a_word_one_space():
    assert list(PreTokenizer("gpt2").split("It's  42nd!?\n\n x 'LL  ")) == [
        *["It", "'s", " ", " 42", "nd", "!?", "\n\n", " x", " '", "LL", "  "]
    ]


def test_gpt4_cuts_numbers_at_three_digits_and_keeps_line_ends_together():
    assert list(PreTokenizer("gpt4").split("It'S 12345;\n\n  x\n ")) == [
        *["It", "'S", " ", "123", "45", ";\n\n", " ", " x", "\n", " "]
    ]


def test_text_between_matches_is_kept_as_a_piece():
    assert list(PreTokenizer("[0-9]+").split("a1b22")) == ["a", "1", "b", "22"]


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(NapkinError, match=r"'\('.*gpt2, gpt4, cl100k, qwen2, o200k"):
        PreTokenizer("(")
