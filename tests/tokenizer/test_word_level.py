"""Words as tokens, and what it costs not to know one."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin.errors import NapkinError
from napkin.tokenizer.word_level import UNK, UnknownRate, WordTokenizer
from oracles.naive_bpe import naive_gpt2_pieces

END = "<|endoftext|>"
WORDS = st.text(alphabet="ab ,\n", min_size=1)


@given(WORDS, st.integers(2, 8))
def test_the_vocabulary_is_the_most_frequent_words_in_order(text: str, vocab_size: int):
    tokenizer = WordTokenizer.train([text], vocab_size)
    counts = Counter(naive_gpt2_pieces(text))

    assert tokenizer.words == sorted(sorted(counts), key=counts.__getitem__, reverse=True)[: vocab_size - 1]
    assert tokenizer.vocab_size == min(vocab_size, len(counts) + 1)


@given(WORDS, WORDS)
def test_known_words_come_back_and_unknown_ones_say_so(learned: str, text: str):
    tokenizer = WordTokenizer.train([learned], 10_000)
    known = set(naive_gpt2_pieces(learned))
    pieces = naive_gpt2_pieces(text)

    assert tokenizer.decode(tokenizer.encode(learned)) == learned
    assert tokenizer.decode(tokenizer.encode(text)) == "".join(piece if piece in known else UNK for piece in pieces)
    lost = [piece for piece in pieces if piece not in known]
    cost = tokenizer.unknown_rate(text)
    assert cost.tokens == pytest.approx(len(lost) / len(pieces))
    assert cost.bytes == pytest.approx(len("".join(lost).encode()) / len(text.encode()))


def test_what_was_learned_loses_nothing():
    assert WordTokenizer.train(["the cat, 42 你好"], 100).unknown_rate("the cat, 42 你好") == UnknownRate(0.0, 0.0)


def test_special_tokens_are_boundaries_and_never_words():
    tokenizer = WordTokenizer.train([f"a b{END}a{END} c"], 100, [END])

    assert tokenizer.words == ["a", " b", " c"]
    assert tokenizer.special_tokens == {UNK: 3, END: 4}
    assert tokenizer.encode(f"a{END}", allowed_special="all") == [0, 4]
    assert tokenizer.encode(UNK) == [3, 3, 3]


def test_words_are_what_the_pattern_cuts():
    assert WordTokenizer.train(["12345"], 100, pattern="gpt4").words == ["123", "45"]
    assert WordTokenizer.train(["it's"], 100, pattern="[a-z]+").words == ["'", "it", "s"]


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        ([], 10, "there is no text to train on"),
        (["", END], 10, "there is no text to train on"),
        (["a"], 2, r"vocab_size 2 is below 3 \(a word, <\|unk\|> and 1 special\): choose a larger one"),
        (["a"], -1, "vocab_size -1 is below"),
        (["a\ud800"], 10, "text 0 contains a lone surrogate"),
        ("text", 10, "put it in a list"),
    ],
)
def test_impossible_training_is_refused(texts: list[str], vocab_size: int, message: str):
    with pytest.raises(NapkinError, match=message):
        WordTokenizer.train(texts, vocab_size, [END])


@pytest.mark.parametrize(
    ("words", "special_tokens", "message"),
    [
        ([], [], "at least one word"),
        (["a", "b", "a"], [], "'a' is given twice"),
        (["a", ""], [], "word 1 is empty"),
        (["a", "\ud800"], [], "word 1 contains a lone surrogate"),
        (["a"], [UNK], r"'<\|unk\|>' is in every word vocabulary already"),
    ],
)
def test_an_impossible_vocabulary_is_refused(words: list[str], special_tokens: list[str], message: str):
    with pytest.raises(NapkinError, match=message):
        WordTokenizer(words, special_tokens)


def test_the_empty_text_costs_nothing_that_could_be_told():
    with pytest.raises(NapkinError, match="the empty text"):
        WordTokenizer(["a"]).unknown_rate("")
