"""Tokenizers compared on one text."""

import pytest

from napkin.tokenizer import ByteTokenizer, CharacterTokenizer, WordTokenizer, compare_tokenizers


def test_figures_are_those_of_each_encoding_and_a_refusal_has_its_reason() -> None:
    text = "to be or not to be"
    tokenizers = [
        ("bytes", ByteTokenizer([])),
        ("words", WordTokenizer.train(["to be"], 4, [])),
        ("characters", CharacterTokenizer.train(["abc"], [])),
    ]
    results, refused = compare_tokenizers(tokenizers, text)
    found = {each.name: each for each in results}
    assert found["bytes"].ids == list(text.encode())
    assert found["bytes"].bytes_per_token == 1
    assert found["bytes"].lost.tokens == 0
    assert found["words"].lost.tokens > 0
    values = found["bytes"].as_values("to")
    assert values["first_tokens"] == ["t", "o"]
    assert values["bytes_per_second"] == pytest.approx(len(text) / found["bytes"].seconds)
    assert list(refused) == ["characters"]
