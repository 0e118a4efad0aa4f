"""Tokenizers from a vocabulary and merges in memory."""

import pytest

from napkin.errors import NapkinError
from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.interchange import from_vocabulary

BYTES = {bytes([i]): i for i in range(256)}


def test_a_trained_tokenizer_is_made_again_from_its_parts() -> None:
    trained = train_bpe(["the cat in the hat isn't THE rat's " * 3], 300)
    tokens = trained.vocabulary
    vocabulary = {token: i for i, token in enumerate(tokens[:-1])}
    merges = [(tokens[first], tokens[second]) for first, second in trained.merges]
    made = from_vocabulary(vocabulary, merges, pattern=trained.pattern, special_tokens=["<|endoftext|>"])
    assert isinstance(made, BPETokenizer)
    assert made.fingerprint == trained.fingerprint


def test_ids_may_be_any() -> None:
    vocabulary = {bytes([i]): i + 2 for i in range(256)} | {b"th": 1}
    made = from_vocabulary(vocabulary, [(b"t", b"h")], pattern="gpt2", special_tokens={"<s>": 0})
    assert made.encode("<s>th", allowed_special="all") == [0, 1]


@pytest.mark.parametrize(
    ("merges", "line"),
    [
        ([(b"t", b"h"), (b"t", b"h")], "repeats merge 0"),
        ([(b"t", b"x")], "b'tx', which is not in the vocabulary"),
    ],
)
def test_merges_that_cannot_be_are_refused(merges: list[tuple[bytes, bytes]], line: str) -> None:
    with pytest.raises(NapkinError, match=line):
        from_vocabulary({**BYTES, b"th": 256}, merges, pattern="gpt2")
