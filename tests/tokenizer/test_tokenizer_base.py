"""What holds for tokenizers of every kind."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import BPETokenizer, ByteTokenizer, RemappedBPETokenizer
from napkin.tokenizer.pre_tokenization import PreTokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.tokenizer.word_level import CharacterTokenizer, WordTokenizer

END = "<|endoftext|>"
GREETING = "Hello, 🌍! 你好!"
SPECIAL = [END, "<|end|>", "<|end|>!"]
TEXT = f"{GREETING} {''.join(SPECIAL)}"
MERGES = [(72, 101), (60, 124), (101, 110)]
WORDS = dict.fromkeys(word for text in (TEXT, "H", END, f"H{END}H") for word in PreTokenizer("gpt2").split(text))
LOSSLESS: list[Tokenizer] = [
    BPETokenizer(MERGES, SPECIAL),
    RemappedBPETokenizer(MERGES, SPECIAL, ids=range(261, -1, -1)),
    RemappedBPETokenizer(MERGES, SPECIAL, ids=range(262, -1, -1), unmerged=[b"endoftext"], whole=True),
    ByteTokenizer(SPECIAL),
    CharacterTokenizer.train([TEXT], SPECIAL),
]
KINDS: list[Tokenizer] = [*LOSSLESS, WordTokenizer(list(WORDS), SPECIAL)]

every_kind = pytest.mark.parametrize("tokenizer", KINDS, ids=lambda tokenizer: tokenizer.kind)
every_lossless_kind = pytest.mark.parametrize("tokenizer", LOSSLESS, ids=lambda tokenizer: tokenizer.kind)


@every_lossless_kind
@given(parts=st.lists(st.sampled_from([*SPECIAL, *"He<|endoftext>!🌍"])))
def test_decode_undoes_encode_with_and_without_special_tokens(tokenizer: Tokenizer, parts: list[str]):
    text = "".join(parts)

    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, allowed_special="all")) == text


@every_kind
def test_a_special_token_written_in_a_text_is_ordinary_text_unless_allowed(tokenizer: Tokenizer):
    ids = tokenizer.encode(f"H{END}H")

    assert not set(ids) & set(tokenizer.special_tokens.values())
    assert tokenizer.decode(ids) == f"H{END}H"
    assert tokenizer.encode_batch([f"H{END}H"]) == [ids] == [list(tokenizer.encode_iterable([f"H{END}H"]))]


@every_kind
def test_only_the_allowed_special_tokens_become_one_id(tokenizer: Tokenizer):
    end, short = tokenizer.special_tokens[END], tokenizer.special_tokens["<|end|>"]
    ordinary = tokenizer.encode("H")

    assert tokenizer.encode(f"H{END}{END}", allowed_special={END}) == [*ordinary, end, end]
    assert tokenizer.encode(f"H{END}<|end|>", allowed_special="all") == [*ordinary, end, short]
    assert tokenizer.encode(f"{END}<|end|>", allowed_special={"<|end|>"}) == [*tokenizer.encode(END), short]


@every_kind
def test_of_special_tokens_that_begin_alike_the_longest_is_meant(tokenizer: Tokenizer):
    assert tokenizer.encode("<|end|>!", allowed_special="all") == [tokenizer.special_tokens["<|end|>!"]]


@every_kind
def test_allowing_a_token_that_is_not_special_is_refused(tokenizer: Tokenizer):
    with pytest.raises(NapkinError, match=r"'<pad>'.*special.*'<\|endoftext\|>'"):
        tokenizer.encode("H", allowed_special={END, "<pad>"})


@every_kind
@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer, wrong: int):
    with pytest.raises(NapkinError, match=f"token.*{wrong}.*outside 0.*{tokenizer.vocab_size - 1}"):
        tokenizer.decode([0, wrong])


@every_kind
def test_a_lone_surrogate_is_refused_with_its_position(tokenizer: Tokenizer):
    with pytest.raises(NapkinError, match=r"lone surrogate \(U\+DC80\).*position 3"):
        tokenizer.encode(f"H{END[:2]}\udc80", allowed_special="all")


@every_kind
def test_every_kind_offers_the_same(tokenizer: Tokenizer, tmp_path: Path):
    ids = tokenizer.encode(GREETING)

    assert tokenizer.decode(ids) == GREETING
    assert tokenizer.decode_bytes(ids) == GREETING.encode() == b"".join(tokenizer.vocabulary[i] for i in ids)
    assert tokenizer.encode_batch([GREETING, "", GREETING]) == [ids, [], ids]
    assert list(tokenizer.encode_iterable([GREETING, GREETING])) == [*ids, *ids]
    assert tokenizer.compression_ratio(GREETING) == len(GREETING.encode()) / len(ids)
    assert set(tokenizer.special_tokens.values()) < set(range(tokenizer.vocab_size))
    assert tokenizer.vocab_size == len(tokenizer.vocabulary)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").fingerprint == tokenizer.fingerprint


def test_half_a_character_decodes_to_a_replacement_character():
    ids = ByteTokenizer().encode("a🌍")

    assert ByteTokenizer().decode(ids[:-1]) == "a\ufffd"
    assert ByteTokenizer().decode_bytes(ids[:-1]) == b"a\xf0\x9f\x8c"


@every_kind
def test_numpy_ids_are_the_same_ids_in_the_smallest_fitting_type(tokenizer: Tokenizer):
    ids = tokenizer.encode_to_numpy(GREETING)

    assert ids.dtype == np.uint16
    assert ids.tolist() == tokenizer.encode(GREETING)
    assert tokenizer.decode(ids) == GREETING


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_numpy_ids_need_four_bytes_from_65537_ids_on(vocab_size: int, dtype: type):
    special = [f"<{i}>" for i in range(vocab_size - 256)]
    tokenizer = ByteTokenizer(special)

    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.encode_to_numpy("text").dtype == dtype
    assert tokenizer.encode(special[-1], allowed_special={special[-1]}) == [vocab_size - 1]


def test_encoding_an_endless_stream_of_texts_takes_only_what_is_asked_for():
    taken: list[str] = []

    def endless() -> Iterator[str]:
        for text in itertools.cycle(["ab", "c"]):
            taken.append(text)
            yield text

    ids = ByteTokenizer().encode_iterable(endless())

    assert list(itertools.islice(ids, 4)) == [97, 98, 99, 97]
    assert taken == ["ab", "c", "ab"]


def test_one_string_in_place_of_a_list_of_texts_is_refused():
    with pytest.raises(NapkinError, match="put it in a list"):
        ByteTokenizer().encode_batch("text")
    with pytest.raises(NapkinError, match="put it in a list"):
        list(ByteTokenizer().encode_iterable("text"))


def test_compression_of_a_greeting_is_1_by_bytes_and_1_538_by_characters():
    assert ByteTokenizer().compression_ratio(GREETING) == 1.0
    assert CharacterTokenizer.train([GREETING]).compression_ratio(GREETING) == pytest.approx(1.538, abs=5e-4)


def test_a_text_of_22_characters_has_33_bytes():
    text = "Hello World! 🌍 你好, 世界!"

    assert len(CharacterTokenizer.train([text]).encode(text)) == 22
    assert len(ByteTokenizer().encode(text)) == 33


def test_the_empty_text_has_no_ids_and_no_compression_ratio():
    assert ByteTokenizer().encode("") == []
    with pytest.raises(NapkinError, match="empty text"):
        ByteTokenizer().compression_ratio("")


def test_fingerprints_differ_wherever_the_ids_could():
    tokenizers = [
        *KINDS,
        ByteTokenizer(),
        ByteTokenizer(SPECIAL[::-1]),
        WordTokenizer(list(WORDS), SPECIAL, pattern="gpt4"),
        WordTokenizer(list(WORDS)[::-1], SPECIAL),
        BPETokenizer([]),
        BPETokenizer([], pattern="whole"),
        BPETokenizer([(97, 98)]),
        BPETokenizer([(98, 97)]),
        CharacterTokenizer("ab"),
        CharacterTokenizer("ba"),
    ]

    assert len({tokenizer.fingerprint for tokenizer in tokenizers}) == len(tokenizers)
    assert ByteTokenizer(SPECIAL).fingerprint == ByteTokenizer(tuple(SPECIAL)).fingerprint


@pytest.mark.parametrize(
    ("special_tokens", "message"),
    [(["<a>", "<a>"], "'<a>' is given twice"), ([""], "is empty"), (["\ud800"], "surrogate"), ("<a>", "write")],
)
def test_special_tokens_that_cannot_be_told_apart_are_refused(special_tokens: list[str], message: str):
    with pytest.raises(NapkinError, match=message):
        ByteTokenizer(special_tokens)


def test_a_lazy_encoding_takes_the_special_tokens_that_are_allowed() -> None:
    tokenizer = ByteTokenizer(["<end>"])
    assert list(tokenizer.encode_iterable(["a<end>", "b"], allowed_special="all")) == [97, 256, 98]
    assert list(tokenizer.encode_iterable(["<end>"])) == list(b"<end>")
