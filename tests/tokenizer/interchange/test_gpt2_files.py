"""vocab.json and merges.txt, against Hugging Face's library, which reads and writes them; and GPT-2's own."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from napkin.errors import NapkinError
from napkin.tokenizer.bpe import BPETokenizer, ByteTokenizer
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.interchange.tiktoken import read_gpt2, write_gpt2
from tokenizer.interchange.conftest import END, SPECIAL


def theirs_of(folder: Path) -> tokenizers.Tokenizer:
    made: Any = tokenizers.Tokenizer(
        tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def test_what_napkin_trained_gives_napkins_ids_there(corpus: list[str], strings: list[str], tmp_path: Path):
    ours = train_bpe(corpus[-20:], 600, SPECIAL)
    write_gpt2(ours, tmp_path)
    theirs = theirs_of(tmp_path)

    assert all(theirs.encode(text).ids == ours.encode(text) for text in strings)
    assert read_gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt").fingerprint == ours.fingerprint


def test_what_the_library_trained_gives_its_ids(theirs: tokenizers.Tokenizer, strings: list[str], tmp_path: Path):
    theirs.model.save(str(tmp_path))
    loaded = theirs_of(tmp_path)

    ours = read_gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt")

    assert list(ours.special_tokens) == SPECIAL
    assert all(ours.encode(text) == loaded.encode(text).ids for text in strings[::3])


def test_line_ends_of_windows_and_a_missing_header_are_read(tmp_path: Path):
    tokenizer = BPETokenizer([(116, 104), (256, 101)], [END])
    write_gpt2(tokenizer, tmp_path)
    merges = tmp_path / "merges.txt"
    lines = merges.read_text().splitlines()

    for text in ("\r\n".join(lines) + "\r\n", "\n".join(lines[1:])):
        merges.write_bytes(text.encode())
        assert read_gpt2(tmp_path / "vocab.json", merges).fingerprint == tokenizer.fingerprint


BYTES = {character: i for i, character in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}


@pytest.mark.parametrize(
    ("vocab", "merges", "special_tokens", "line"),
    [
        ("[]", "", None, "Expected `object`, got `array`"),
        ('{"a":', "", None, "it is not JSON"),
        ("[" * 10**5, "", None, "nested too deeply|Expected `object`"),
        ({"a": 0}, "", None, "255 of the 256 bytes have no token"),
        ({}, "", None, "256 of the 256 bytes have no token"),
        ({**BYTES, "th": 256}, "t h\nt h", None, "merge 1, of 't' and 'h', repeats merge 0"),
        ({**BYTES, "th": 256}, "t h\nth e", None, "merge 1 of 'th e' needs 'the', which is not in the vocabulary"),
        ({**BYTES, "th": 256}, "t  h", None, "merge 0 is 't  h': two tokens separated by one space"),
        ({**BYTES, "th": 256}, b"t h\n\xff\xfe", None, "it is not UTF-8 at byte 4"),
        ({**BYTES, "th": 257}, "t h", None, "no token has id 256"),
        ({**BYTES, "th": 255}, "t h", None, "id 255 is given to"),
        ({**BYTES, "a b": 256}, "", [], "has a character that represents no byte"),
    ],
)
def test_what_is_damaged_is_refused_in_a_line(
    vocab: Any, merges: str | bytes, special_tokens: list[str] | None, line: str, tmp_path: Path
):
    paths = tmp_path / "vocab.json", tmp_path / "merges.txt"
    paths[0].write_text(vocab if isinstance(vocab, str) else json.dumps(vocab))
    paths[1].write_bytes(merges if isinstance(merges, bytes) else merges.encode())

    with pytest.raises(NapkinError, match=line) as caught:
        read_gpt2(*paths, special_tokens=special_tokens)
    assert "vocab.json' and '" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tokenizer", "line"),
    [
        (ByteTokenizer(), "of kind 'bytes' has no merges"),
        (BPETokenizer([], pattern="gpt4"), "cannot store the pattern 'gpt4'"),
        (BPETokenizer([(97, 97), (256, 97), (97, 256)]), "cannot represent this tokenizer exactly"),
    ],
)
def test_what_the_files_cannot_say_is_not_written(tokenizer: Any, line: str, tmp_path: Path):
    with pytest.raises(NapkinError, match=line):
        write_gpt2(tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())


def test_one_of_two_files_that_exists_is_kept_and_the_other_not_written(tmp_path: Path):
    (tmp_path / "merges.txt").write_text("mine")

    with pytest.raises(NapkinError, match=r"merges\.txt'.*overwritten"):
        write_gpt2(BPETokenizer([]), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["merges.txt"]
    assert (tmp_path / "merges.txt").read_text() == "mine"


def test_gpt2s_own_vocabulary_gives_the_ids_and_the_ratio_that_are_known_of_it():
    folder = os.environ.get("NAPKIN_GPT2_FILES")
    if folder is None:
        pytest.skip("NAPKIN_GPT2_FILES names no folder with GPT-2's encoder.json and vocab.bpe")
    gpt2 = read_gpt2(Path(folder) / "encoder.json", Path(folder) / "vocab.bpe")

    assert gpt2.encode("Hello, world!") == [15496, 11, 995, 0]
    assert gpt2.compression_ratio("Hello, 🌍! 你好!") == pytest.approx(1.667, abs=5e-4)
    assert gpt2.special_tokens == {END: 50256}


def test_special_tokens_that_are_new_get_the_ids_after_the_last(tmp_path: Path) -> None:
    vocab = {**BYTES, END: 256}
    paths = tmp_path / "vocab.json", tmp_path / "merges.txt"
    paths[0].write_text(json.dumps(vocab), "utf-8")
    paths[1].write_text("", "utf-8")
    tokenizer = read_gpt2(*paths, special_tokens=[END, "<pad>", "<user>"])
    assert tokenizer.special_tokens == {END: 256, "<pad>": 257, "<user>": 258}
