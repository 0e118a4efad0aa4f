"""tokenizer.json with the normal form C and the pattern of Qwen 2 and 3, against Hugging Face's own library."""

import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import RemappedBPETokenizer, normal_form_c
from napkin.tokenizer.interchange.huggingface import read_huggingface, write_huggingface
from napkin.tokenizer.tokenizer_file import load_tokenizer

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DECOMPOSED = unicodedata.normalize("NFD", "Größe é한국어 ぱ Ελληνικά й ấ")
MARKS = "\u0301\u0323\u0307\u0334\u05b0\u0315\u1171\u11a8\u1100\u1161ae한é\u212b\u2126 1\n"
TEXTS = (
    st.text()
    | st.text(alphabet=MARKS)
    | st.lists(st.sampled_from(["<|im_end|>", "<think>", "it's", " e\u0301", DECOMPOSED, " 2024", "\r\n", "🌍"])).map(
        "".join
    )
)


def qwens(corpus: list[str]) -> Any:
    """Built as Qwen's tokenizers are."""
    made: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.normalizer = tokenizers.normalizers.NFC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([*corpus, DECOMPOSED * 20], trainer)
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.add_tokens([tokenizers.AddedToken("<think>", normalized=False, special=False)])
    return made


@pytest.fixture(scope="module")
def pair(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    made = qwens(corpus)
    path = tmp_path_factory.mktemp("qwen") / "tokenizer.json"
    made.save(str(path))
    return made, read_huggingface(path)


def test_ids_and_texts_are_those_of_the_library(pair: tuple[Any, Tokenizer], strings: list[str]) -> None:
    theirs, ours = pair
    assert isinstance(ours, RemappedBPETokenizer)
    assert ours.pattern == "qwen2"
    assert ours.vocab_size == theirs.get_vocab_size()
    for text in [*strings[::3], DECOMPOSED, unicodedata.normalize("NFD", strings[3])]:
        ids = theirs.encode(text).ids
        assert ours.encode(text, allowed_special="all") == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)

    @given(TEXTS)
    def on_any_text(text: str) -> None:
        ids = theirs.encode(text).ids
        assert ours.encode(text, allowed_special="all") == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)

    on_any_text()


@given(TEXTS)
def test_decoding_gives_the_normal_form_and_a_normal_text_itself(text: str) -> None:
    tokenizer = RemappedBPETokenizer([(101, 204), (195, 169)], ids=range(258), normalize=True)
    normal = normal_form_c(text)
    assert tokenizer.decode(tokenizer.encode(text)) == normal
    assert normal_form_c(normal) == normal
    assert tokenizer.encode(normal) == tokenizer.encode(text)


def test_every_character_is_normalized_as_the_library_does() -> None:
    """Alone, decomposed, and among marks of low and high combining classes, which are sorted."""
    theirs = tokenizers.normalizers.NFC().normalize_str
    for code in range(0x80, sys.maxunicode + 1):
        if 0xD800 <= code < 0xE000 or 0x4E00 <= code < 0xA000 or 0x17000 <= code < 0x1AFF0 or 0x20000 <= code < 0xE0000:
            continue
        character = chr(code)
        text = f"x\u0315{character}\u0334{character}\u05b0 {unicodedata.normalize('NFD', character)}\u0307{character}"
        assert normal_form_c(text) == theirs(text), hex(code)


def test_all_ways_to_encode_agree_and_files_keep_the_normal_form(
    pair: tuple[Any, Tokenizer], corpus: list[str], tmp_path: Path
) -> None:
    theirs, ours = pair
    texts = [DECOMPOSED, "abc", "", *corpus[-2:], corpus[0]]
    expected = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
    assert ours.encode_batch(texts) == expected
    joined, counts = ours.encode_documents(texts)
    data = [text.encode() for text in texts]
    again, _ = ours.encode_utf8(b"".join(data), [sum(map(len, data[: i + 1])) for i in range(len(data))])
    assert joined.tolist() == again.tolist() == [i for ids in expected for i in ids]
    assert counts.tolist() == list(map(len, expected))
    assert ours.encode_to_numpy(DECOMPOSED).tolist() == expected[0]

    ours.save(tmp_path / "napkin.json")
    assert load_tokenizer(tmp_path / "napkin.json").encode(DECOMPOSED) == expected[0]
    write_huggingface(ours, tmp_path / "tokenizer.json")
    assert json.loads((tmp_path / "tokenizer.json").read_text())["normalizer"] == {"type": "NFC"}
    assert read_huggingface(tmp_path / "tokenizer.json").fingerprint == ours.fingerprint
