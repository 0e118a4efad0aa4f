"""Encoding against merging by hand, and round trips for every string and every byte."""

import copy
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin.errors import NapkinError
from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.character_bpe import merge_by_heap, merge_by_scanning
from oracles.naive_bpe import lowest_rank_first, merges_in_any_order, naive_encode, naive_gpt2_pieces

END = "<|endoftext|>"
SAMPLE = ["the cat in the hat sat; the rat didn't. " * 3, "naïve 你好 你好 🌍🌍 \n\n    indented\n    lines 1234 234"]
TRAINED = train_bpe(SAMPLE, 330)
ANY_TEXT = st.text() | st.text(alphabet="the cat'sn\n 1你🌍", max_size=80)


@given(ANY_TEXT)
def test_decode_undoes_encode_for_every_string(text: str):
    assert TRAINED.decode(TRAINED.encode(text)) == text


@given(ANY_TEXT, st.sampled_from(["", "x*", "[a-z]+", r"\b", r"t\Kh", "(?r)e+", "(a)|(t)", "gpt4", "whole"]))
def test_decode_undoes_encode_for_patterns_that_do_not_cover_the_text(text: str, pattern: str):
    tokenizer = BPETokenizer(TRAINED.merges, pattern=pattern)

    assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()


@given(st.lists(st.integers(0, TRAINED.vocab_size - 1)))
def test_every_sequence_of_ids_decodes_to_the_bytes_they_stand_for(ids: list[int]):
    data = b"".join(TRAINED.vocabulary[i] for i in ids)

    assert TRAINED.decode_bytes(iter(ids)) == data
    assert TRAINED.decode(ids) == data.decode("utf-8", errors="replace")


@given(ANY_TEXT)
def test_encode_equals_applying_every_merge_in_turn_to_every_piece(text: str):
    pieces = [piece.encode() for piece in TRAINED._pre_tokenizer.split(text)]

    assert TRAINED.encode(text) == [i for piece in pieces for i in naive_encode(piece, TRAINED.merges)]


@pytest.mark.parametrize("merge", [merge_by_scanning, merge_by_heap])
@pytest.mark.parametrize("alphabet", ["a", "ab", "abc", "the cat"])
def test_both_forms_of_merging_equal_applying_every_merge_in_turn(merge, alphabet: str):
    for seed in range(60):
        draw = random.Random(seed)
        text = "".join(draw.choices(alphabet, k=draw.randint(0, 120)))
        merges: list[tuple[int, int]] = []
        while len(merges) < draw.randint(1, 60):
            earlier = [*map(ord, alphabet), *range(256, 256 + len(merges))]
            pair = draw.choice(earlier), draw.choice(earlier)
            if pair not in merges:
                merges.append(pair)

        ranks = {pair: 256 + i for i, pair in enumerate(merges)}
        ids = merge(list(text.encode()), ranks, range(256 + len(merges)))

        assert ids == naive_encode(text.encode(), merges)


def test_a_merge_may_join_what_a_later_merge_makes():
    # Of "abcabc", bc is merged first; then abc can be, whose merge comes before the one that makes its part.
    tokenizer = BPETokenizer([(97, 257), (98, 99), (256, 256)], pattern="whole")

    assert tokenizer.vocabulary[256:] == [b"abc", b"bc", b"abcabc"]
    assert tokenizer.encode("abcabcbc") == [258, 257]


@given(st.data())
def test_merges_in_any_order_are_those_of_lowest_rank_that_can_be_applied(data: st.DataObject):
    merges = data.draw(merges_in_any_order())
    pieces = data.draw(st.lists(st.text(alphabet="abc", max_size=90), max_size=4))
    tokenizer = BPETokenizer(merges, pattern="whole")

    for piece in pieces:
        assert tokenizer.encode(piece) == lowest_rank_first(piece.encode(), merges)


def test_training_text_is_cut_as_it_was_while_training():
    text = "abracadabra " * 4
    tokenizer = train_bpe([text], 300, (), "gpt2")

    assert tokenizer.encode("abracadabra") == [tokenizer.vocabulary.index(b"abracadabra")]
    assert naive_gpt2_pieces(text)[1] == " abracadabra"
    assert tokenizer.encode(text)[1] == tokenizer.vocabulary.index(b" abracadabra")


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("unit", ["a", " ", "ab", "🌍", "=-"])
def test_a_megabyte_without_a_boundary_is_encoded_and_decoded(unit: str):
    text = unit * (2**20 // len(unit.encode()))
    tokenizer = train_bpe([unit * 64], 300, pattern="whole")

    ids = tokenizer.encode(text)

    assert tokenizer.decode(ids) == text
    assert len(ids) == 2**20 // 64 // len(unit.encode())


def test_ids_are_bytes_then_merges_then_special_tokens():
    tokenizer = BPETokenizer([(116, 104), (256, 101)], [END, "<pad>"])

    assert tokenizer.vocabulary == [bytes([i]) for i in range(256)] + [b"th", b"the", END.encode(), b"<pad>"]
    assert tokenizer.special_tokens == {END: 258, "<pad>": 259}
    assert tokenizer.vocab_size == 260


def test_forgetting_cached_pieces_does_not_change_the_ids(monkeypatch: pytest.MonkeyPatch):
    text = " ".join(f"the{i % 17}cat{i % 5}" for i in range(300))
    expected = BPETokenizer(TRAINED.merges).encode(text)
    monkeypatch.setattr("napkin.tokenizer.character_bpe._CACHED_PIECES", 3)
    tokenizer = BPETokenizer(TRAINED.merges)

    assert tokenizer.encode(text) == expected
    assert len(tokenizer._ids_of) <= 3


def test_a_copy_of_a_tokenizer_that_has_been_used_encodes_alike():
    ids = TRAINED.encode(SAMPLE[1])

    assert copy.deepcopy(TRAINED).encode(SAMPLE[1]) == ids


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        ([(97, 256)], "merge 0 joins ids 97 and 256, .* 256, the id that it makes"),
        ([(97, 257), (256, 98)], "merge 0 joins ids 97 and 257, .* 256, the id that it makes"),
        ([(97, 257), (98, 258), (99, 257)], "merge 1 joins ids 98 and 258, .* 257, the id that it makes"),
        ([(97, -1)], "merge 0 joins ids 97 and -1: .* 0 to 256"),
        ([(97, 98), (258, 97)], "merge 1 joins ids 258 and 97: .* 0 to 257"),
        ([(97, 98), (97, 98)], r"merge \(97, 98\) is given twice"),
        ([(97, 97), *((i, i) for i in range(256, 300))], "exceed 268435456 bytes"),
    ],
)
def test_impossible_merges_are_refused(merges: list[tuple[int, int]], message: str):
    with pytest.raises(NapkinError, match=message):
        BPETokenizer(merges)
