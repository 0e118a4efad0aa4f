import gzip
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from napkin.data.corpus import Document
from napkin.data.token_file import SEPARATOR
from napkin.data.token_writer import write_token_file
from napkin.errors import NapkinError
from napkin.evaluation.text_windows import documents_of_texts, documents_of_tokens, sampled_bits, windows_for
from napkin.tokenizer import ByteTokenizer, CharacterTokenizer, Tokenizer, WordTokenizer
from oracles.served_model import tiny_served_model

OPENED = tiny_served_model()
TOKENIZER = OPENED.tokenizer
START = OPENED.start_ids
DRAW = random.Random(0)
TEXTS = ["".join(DRAW.choices("etaoin é", k=n)) for n in (5, 90, 41, 1, 64)]


class Short(torch.nn.Module):
    """The tiny model with a shorter context."""

    def __init__(self, context_length: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(context_length=context_length)

    def hidden(self, tokens: Tensor) -> Tensor:
        assert tokens.shape[1] <= self.config.context_length
        return OPENED.model.hidden(tokens)

    def logits_of(self, hidden: Tensor) -> Tensor:
        return OPENED.model.logits_of(hidden)


@torch.no_grad()
def bits_token_by_token(text: str, context_length: int, stride: int) -> float:
    """By the definition of the windows: one forward pass for each token."""
    tokens = [*START, *TOKENIZER.encode(text)]
    bits = 0.0
    for target in range(1, len(tokens)):
        window = 0 if target <= context_length else math.ceil((target - context_length) / stride)
        seen = tokens[window * stride : target]
        logits = OPENED.model(torch.tensor([seen]))[0, -1].double()
        bits += float(logits.logsumexp(0) - logits[tokens[target]]) / math.log(2)
    return bits


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("context_length", "stride"), [(16, 1), (16, 8), (16, 16), (200, 100)])
def test_all_windows_are_every_token_predicted_by_itself(context_length: int, stride: int) -> None:
    documents = documents_of_texts(TEXTS, TOKENIZER)
    found = sampled_bits(Short(context_length), documents, TOKENIZER, START, stride=stride)
    n_bytes = sum(len(text.encode()) for text in TEXTS)
    expected = sum(bits_token_by_token(text, context_length, stride) for text in TEXTS)
    assert found.bits_per_byte == pytest.approx(expected / n_bytes, rel=1e-5)
    assert (found.bytes, found.tokens, found.windows) == (n_bytes, found.all_tokens, found.all_windows)
    assert found.low == found.high == found.bits_per_byte
    assert found.gzip_bits_per_byte == pytest.approx(
        8 * len(gzip.compress("".join(TEXTS).encode(), 9)) / n_bytes, abs=8 * 8 / n_bytes
    )


def test_a_model_in_training_is_scored_without_dropout_and_left_in_training() -> None:
    class WithDropout(Short):
        def hidden(self, tokens: Tensor) -> Tensor:
            return torch.nn.functional.dropout(super().hidden(tokens), training=self.training)

    documents = documents_of_texts(TEXTS, TOKENIZER)
    model = WithDropout(16).train()
    assert sampled_bits(model, documents, TOKENIZER, START) == sampled_bits(Short(16), documents, TOKENIZER, START)
    assert model.training


def test_documents_of_a_token_file_are_those_between_separators(tmp_path: Path) -> None:
    token_file = write_token_file(
        tmp_path / "text.tokens", [Document(name=str(n), text=text) for n, text in enumerate([*TEXTS, ""])], TOKENIZER
    )
    of_tokens, of_texts = documents_of_tokens(token_file, TOKENIZER), documents_of_texts(TEXTS, TOKENIZER)
    assert np.array_equal(of_tokens.ids, of_texts.ids)
    assert np.array_equal(of_tokens.ends, of_texts.ends)
    assert of_tokens.sha256 == of_texts.sha256 != documents_of_texts(["".join(TEXTS)], TOKENIZER).sha256


class Prefixed(ByteTokenizer):
    """Puts a space before each text, as SentencePiece does."""

    strips_space = True

    def _encode_ordinary(self, text: str) -> list[int]:
        return super()._encode_ordinary(f" {text}")

    def decode(self, ids: Any) -> str:
        return super().decode(ids).removeprefix(" ")


def test_a_space_that_the_tokenizer_adds_is_no_byte_of_the_text(tmp_path: Path) -> None:
    tokenizer = Prefixed([SEPARATOR])
    texts = ["two words", " a space"]
    of_texts = documents_of_texts(texts, tokenizer)
    written = write_token_file(tmp_path / "t.tokens", [Document(name=text, text=text) for text in texts], tokenizer)
    of_tokens = documents_of_tokens(written, tokenizer)
    assert of_tokens.sha256 == of_texts.sha256 == documents_of_texts(texts, TOKENIZER).sha256
    for documents in (of_texts, of_tokens):
        found = sampled_bits(Unigram(), documents, tokenizer, START)
        assert (found.tokens, found.bytes) == (19, 17)


class Markov(torch.nn.Module):
    """A language of Greek letters, each drawn by the one before: as characters, or as the bytes of characters."""

    def __init__(self, tokenizer: Tokenizer, letters: str, *, of_bytes: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(context_length=4096)
        draw = np.random.default_rng(0)
        chances = draw.dirichlet(np.ones(len(letters)), size=len(letters) + 1)
        self._table = {}
        for before, row in zip(["", *letters], chances, strict=True):
            for letter, chance in zip(letters, row, strict=True):
                self._table[before, letter] = chance
        self._tokenizer, self._letters, self._of_bytes = tokenizer, letters, of_bytes
        self.hidden_calls = 0

    def hidden(self, tokens: Tensor) -> Tensor:
        """The logits themselves."""
        rows = torch.full((*tokens.shape, self._tokenizer.vocab_size), -1e9)
        for row, ids in enumerate(tokens.tolist()):
            for place in range(len(ids)):
                data = self._tokenizer.decode_bytes(ids[1 : place + 1])
                for token, chance in self._next(data).items():
                    rows[row, place, token] = math.log(chance)
        return rows

    def logits_of(self, hidden: Tensor) -> Tensor:
        return hidden

    def _next(self, data: bytes) -> dict[int, float]:
        whole = data.decode(errors="ignore")
        begun = data[len(whole.encode()) :]
        found: dict[int, float] = {}
        for letter in self._letters:
            chance, code = self._table[whole[-1:], letter], letter.encode()
            if not self._of_bytes:
                found[self._tokenizer.encode(letter)[0]] = chance
            elif code.startswith(begun):
                byte = code[len(begun)]
                found[byte] = found.get(byte, 0.0) + chance
        total = sum(found.values())
        return {token: chance / total for token, chance in found.items()}


def test_one_distribution_has_the_same_bits_per_byte_as_bytes_and_as_characters() -> None:
    letters = "αβγλοπρσω"
    text = ["".join(DRAW.choices(letters, k=60)) for _ in range(3)]
    found = []
    for tokenizer, of_bytes in (
        (ByteTokenizer([SEPARATOR]), True),
        (CharacterTokenizer.train(text, special_tokens=[SEPARATOR]), False),
    ):
        model = Markov(tokenizer, letters, of_bytes=of_bytes)
        start = (tokenizer.special_tokens[SEPARATOR],)
        found.append(sampled_bits(model, documents_of_texts(text, tokenizer), tokenizer, start))
    assert found[0].bits_per_byte == pytest.approx(found[1].bits_per_byte, rel=1e-5)
    assert found[0].bytes == found[1].bytes
    assert found[0].tokens == 2 * found[1].tokens


class Unigram(torch.nn.Module):
    """Fixed probabilities of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(context_length=16)
        self._logits = torch.randn(TOKENIZER.vocab_size, generator=torch.Generator().manual_seed(0))

    def hidden(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, 1)

    def logits_of(self, hidden: Tensor) -> Tensor:
        return self._logits.expand(len(hidden), -1)


@pytest.mark.thorough
def test_the_sample_grows_until_the_error_is_what_was_asked_and_covers_the_whole() -> None:
    draw = random.Random(1)
    # Documents of different languages, so that windows differ.
    texts = ["".join(draw.choices(draw.choice(["ab", "etaoin ", "xyzXYZ019"]), k=120)) for _ in range(200)]
    documents = documents_of_texts(texts, TOKENIZER)
    whole = sampled_bits(Unigram(), documents, TOKENIZER, START)
    samples = [sampled_bits(Unigram(), documents, TOKENIZER, START, error=0.08, seed=seed) for seed in range(25)]
    for found in samples:
        assert found.standard_error <= 0.08
        assert 100 <= found.windows < whole.windows
    covered = sum(found.low <= whole.bits_per_byte <= found.high for found in samples)
    # 95% within three standard errors, less what stopping early costs.
    assert covered >= 21
    pilot = sampled_bits(Unigram(), documents, TOKENIZER, START, max_windows=100)
    assert windows_for(pilot, error=0.08, max_tokens=None) == pytest.approx(samples[0].windows, rel=0.35)
    assert windows_for(pilot, error=None, max_tokens=None) == whole.windows
    assert windows_for(pilot, error=1e-9, max_tokens=80) == pytest.approx(80 / 8, rel=0.3)
    few = sampled_bits(Unigram(), documents, TOKENIZER, START, max_tokens=200)
    assert 200 <= few.tokens < 200 + 16 * 16
    assert few.standard_error > 0.08


@pytest.mark.thorough
@pytest.mark.parametrize("taken", [pytest.param(0.25, marks=pytest.mark.torture), 0.75])
def test_the_error_is_the_spread_of_samples_without_replacement(taken: float) -> None:
    """As far as 50 samples tell it: without the factor for a finite text it would be twice as much."""
    texts = ["".join(DRAW.choices("etaoin shrdlu", k=n)) for n in DRAW.choices(range(4, 17), k=64)]
    documents = documents_of_texts(texts, TOKENIZER)
    whole = sampled_bits(Unigram(), documents, TOKENIZER, START)
    assert whole.standard_error == 0
    # Batches are of eight windows, of which a text of 64 documents has eight.
    n = round(taken * whole.windows)
    samples = [sampled_bits(Unigram(), documents, TOKENIZER, START, max_windows=n, seed=seed) for seed in range(50)]
    assert {each.windows for each in samples} == {n}
    spread = np.std([each.bits_per_byte for each in samples])
    told = np.mean([each.standard_error for each in samples])
    assert told == pytest.approx(spread, rel=0.25)


def test_what_cannot_be_measured_is_refused() -> None:
    documents = documents_of_texts(TEXTS, TOKENIZER)
    words = WordTokenizer.train(["known words"], vocab_size=10)
    with pytest.raises(NapkinError, match=r"changes.*text.*document 1"):
        documents_of_texts(["unknown"], words)
    with pytest.raises(NapkinError, match="no text"):
        documents_of_texts(["", ""], TOKENIZER)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"stride": 0}, "a stride of 0"),
        ({"stride": 17}, "a stride of 17 is not possible: choose from 1 to 16"),
        ({"error": 0.0}, "an error of 0.0"),
        ({"max_tokens": 0}, "--max-tokens is 0"),
    ]
    for settings, complaint in refused:
        with pytest.raises(NapkinError, match=complaint):
            sampled_bits(Short(16), documents, TOKENIZER, START, **settings)
    with pytest.raises(NapkinError, match=r"token.*stands"):
        sampled_bits(Short(16), documents, TOKENIZER, ())
