"""Characters as tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin.errors import NapkinError
from napkin.tokenizer.word_level import CharacterTokenizer


@given(st.lists(st.text(), min_size=1).filter(any))
def test_ids_are_places_in_the_sorted_characters_of_the_training_texts(texts: list[str]):
    tokenizer = CharacterTokenizer.train(iter(texts))
    everything = "".join(texts)

    assert tokenizer.encode(everything) == [sorted(set(everything)).index(character) for character in everything]
    assert tokenizer.decode(tokenizer.encode(everything)) == everything


def test_special_tokens_come_after_the_characters():
    tokenizer = CharacterTokenizer.train(["ba"], ["<end>"])

    assert tokenizer.encode("ab<end>", allowed_special={"<end>"}) == [0, 1, 2]


def test_an_unknown_character_is_named():
    with pytest.raises(NapkinError, match=r"character 'é' \(U\+00E9\).*2"):
        CharacterTokenizer.train(["ab"]).encode("abé")


@pytest.mark.parametrize(("characters", "message"), [("", "at least one"), ("aba", "'a' is given twice")])
def test_a_vocabulary_that_is_empty_or_names_a_character_twice_is_refused(characters: str, message: str):
    with pytest.raises(NapkinError, match=message):
        CharacterTokenizer(characters)
