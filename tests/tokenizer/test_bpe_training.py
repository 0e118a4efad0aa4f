"""The trainer against one that recounts everything, and the rules it promises."""

import random
from pathlib import Path

import pytest

from napkin.errors import NapkinError
from napkin.tokenizer.bpe_training import train_bpe
from oracles.naive_bpe import naive_gpt2_pieces, naive_train

END = "<|endoftext|>"


@pytest.mark.parametrize("alphabet", ["a", "ab", "aab b", "abc \n", "né 你'tsl1."])
def test_merges_equal_those_of_a_trainer_that_recounts_everything(alphabet: str):
    for seed in range(40):
        draw = random.Random(seed)
        texts = ["".join(draw.choices(alphabet, k=draw.randint(0, 60))) for _ in range(draw.randint(1, 6))]
        texts.append(alphabet)
        n_merges = draw.randint(0, 40)
        pieces = [piece.encode() for text in texts for piece in naive_gpt2_pieces(text)]

        tokenizer = train_bpe(texts, 256 + n_merges, special_tokens=())

        assert tokenizer.merges == naive_train(pieces, n_merges)


@pytest.mark.parametrize("seed", range(10))
def test_merges_of_one_long_piece_equal_those_of_a_trainer_that_recounts_everything(seed: int):
    text = "".join(random.Random(seed).choices("ab", k=300))

    assert train_bpe([text], 320, (), "whole").merges == naive_train([text.encode()], 64)


def test_three_merges_on_the_cat_in_the_hat_are_th_the_and_the_with_its_space():
    tokenizer = train_bpe(["the cat in the hat"], 259, special_tokens=(), pattern="whole")

    assert tokenizer.merges == [(116, 104), (256, 101), (257, 32)]
    assert tokenizer.vocabulary[256:] == [b"th", b"the", b"the "]


def test_of_equally_frequent_pairs_the_greatest_byte_strings_merge_first():
    # "ab", "ac", "ba" once each: the second byte decides only where the first is equal.
    assert train_bpe(["ab\nac\nba"], 259, (), pattern="[a-z]+").merges == [
        (ord("b"), ord("a")),
        (ord("a"), ord("c")),
        (ord("a"), ord("b")),
    ]


def test_a_tie_compares_the_bytes_of_tokens_and_not_their_ids():
    # After b+b -> 256 the pairs ("bb", "x") and ("c", "x") occur once each: "c" is greater, though 99 < 256.
    assert train_bpe(["bbx bb cx"], 258, (), pattern="[a-z]+").merges == [(98, 98), (99, 120)]


def test_a_tie_puts_a_longer_byte_string_after_its_beginning():
    # ("aa", "b") is greater than ("a", "b"): of two that begin alike the longer is the greater.
    assert train_bpe(["aab aa aa ab"], 258, (), pattern="[a-z]+").merges == [(97, 97), (256, 98)]


def test_the_order_of_texts_and_how_they_are_divided_does_not_change_the_vocabulary():
    lines = [f"line {i % 7} of {i % 5} words\n" for i in range(200)]
    shuffled = random.Random(0).sample(lines, k=len(lines))

    assert train_bpe(lines, 300).fingerprint == train_bpe(iter(shuffled), 300).fingerprint


def test_a_special_token_is_a_boundary_that_is_neither_counted_nor_merged_across():
    with_special = train_bpe([f"low{END}er lower{END}{END}lowest"], 270)
    apart = train_bpe(["low", "er lower", "lowest"], 270)

    assert with_special.fingerprint == apart.fingerprint
    assert with_special.special_tokens == {END: with_special.vocab_size - 1}
    assert not any(b"<" in token or b"|" in token for token in with_special.vocabulary[256:-1])


def test_a_corpus_with_too_few_pairs_gives_a_smaller_vocabulary():
    tokenizer = train_bpe(["abc abc"], 5000)

    assert [tokenizer.encode(word) for word in ("abc", " abc")] == [[257], [258]]
    assert tokenizer.vocab_size == 256 + 3 + 1


def test_a_vocabulary_of_just_the_bytes_and_special_tokens_has_no_merges():
    assert train_bpe(["some text"], 257).merges == []


@pytest.mark.parametrize("vocab_size", [0, 256, 257, 2**21])
def test_a_vocab_size_without_room_or_beyond_reach_is_refused_with_its_limits(vocab_size: int):
    with pytest.raises(NapkinError, match=rf"vocab_size {vocab_size}.*outside 258 .*1114112"):
        train_bpe(["text"], vocab_size, special_tokens=("<a>", "<b>"))


@pytest.mark.parametrize("texts", [[], [""], ["", END + END]])
def test_an_empty_corpus_is_refused(texts: list[str]):
    with pytest.raises(NapkinError, match="no text"):
        train_bpe(texts, 300)


def test_one_string_in_place_of_a_list_of_texts_is_refused():
    with pytest.raises(NapkinError, match="put it in a list"):
        train_bpe("one text", 300)


def test_a_lone_surrogate_is_refused_with_its_text_and_position():
    with pytest.raises(NapkinError, match=r"text 1 contains.*surrogate \(U\+D800\).*position 2"):
        train_bpe(["fine", "ab\ud800"], 300)


def test_progress_ends_each_stage_with_all_that_was_done():
    calls: list[tuple[str, int, int]] = []
    words = random.Random(0).choices("abcdef", k=4000)

    tokenizer = train_bpe(["".join(words)] * 300, 456, progress=lambda *call: calls.append(call))

    assert [call for call in calls if call[0] == "counting"] == [("counting", n, 300) for n in (263, 300)]
    assert [call for call in calls if call[0] == "merging"] == [("merging", n, 199) for n in (64, 128, 192, 199)]
    assert len(tokenizer.merges) == 199


def test_progress_gives_no_total_for_texts_that_have_no_length():
    calls: list[tuple[str, int, int]] = []

    train_bpe((text for text in ["a" * 2**20, "b"]), 258, progress=lambda *call: calls.append(call))

    assert calls[:2] == [("counting", 1, 0), ("counting", 2, 2)]


def test_files_are_trained_on_like_their_texts(tmp_path: Path) -> None:
    text = "the cat in the hat<|endoftext|>the rat 你好\n" * 50
    (tmp_path / "text.txt").write_text(text, "utf-8")
    expected = train_bpe([text, "more text"], 300)
    assert train_bpe([tmp_path / "text.txt", "more text"], 300).fingerprint == expected.fingerprint
    assert train_bpe(iter([tmp_path / "text.txt", "more text"]), 300).fingerprint == expected.fingerprint
