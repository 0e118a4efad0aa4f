"""Bytes as tokens."""

from hypothesis import given
from hypothesis import strategies as st

from napkin.tokenizer.bpe import ByteTokenizer


@given(st.text())
def test_ids_are_the_bytes_of_the_utf_8_form(text: str):
    assert bytes(ByteTokenizer().encode(text)) == text.encode()
    assert ByteTokenizer().decode(text.encode()) == text


@given(st.binary())
def test_every_sequence_of_bytes_decodes(data: bytes):
    assert ByteTokenizer().decode_bytes(data) == data
    assert ByteTokenizer().decode(data) == data.decode("utf-8", errors="replace")


def test_hello_is_five_bytes_and_special_tokens_start_at_256():
    tokenizer = ByteTokenizer(["<a>", "<b>"])

    assert len(tokenizer.encode("hello")) == 5
    assert tokenizer.special_tokens == {"<a>": 256, "<b>": 257}
