"""Kneser-Ney's model beside its definition in dictionaries, and what every model of text has to be."""

import math
import random
from pathlib import Path

import numpy as np
import pytest

from napkin.errors import CorruptFile, NapkinError
from napkin.evaluation.ngrams import NgramModel, PlainKneserNey, train_ngrams, training_bytes


def sentences(seed: int, n: int) -> list[bytes]:
    draw = random.Random(seed)
    words = "the a cat dog sat on mat and ran to café 日本 it is . , !".split()
    found = [" ".join(draw.choice(words) for _ in range(draw.randint(0, 12))).encode() for _ in range(n)]
    return [*found, b"x", b"", b"ab"]


def plain_bits(model: PlainKneserNey, document: bytes) -> float:
    sequence = b"\xff" + document
    return -sum(math.log2(model.probability(sequence[:i], sequence[i])) for i in range(1, len(sequence)))


@pytest.mark.parametrize("order", [2, 3, 5, 8])
def test_bits_are_those_of_the_definition(order: int) -> None:
    training, other = sentences(0, 60), sentences(1, 20)
    plain = PlainKneserNey(training, order)
    # In several parts, which are merged.
    model = train_ngrams(training, order, part_bytes=300)
    expected = [plain_bits(plain, document) for document in other]
    assert model.bits(other).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    n_bytes = sum(map(len, other))
    perplexity, of_plain = 2 ** model.bits_per_byte(other), 2 ** (sum(expected) / n_bytes)
    assert abs(perplexity - of_plain) < 1e-9
    assert model.n_grams == [len(plain._counts[n]) for n in range(1, order + 1)]


def test_probabilities_of_the_definition_add_up_to_one() -> None:
    plain = PlainKneserNey(sentences(2, 40), 4)
    for context in (b"", b"\xff", b"\xffth", b"the c", b"zzz", "日".encode()):
        assert math.fsum(plain.probability(context, symbol) for symbol in range(256)) == pytest.approx(1, abs=1e-12)


def test_of_a_coin_the_bits_approach_its_entropy() -> None:
    draw = np.random.default_rng(0)
    flips = [bytes(np.where(draw.random(50_000) < 0.2, 97, 98).astype(np.uint8)) for _ in range(2)]
    model = train_ngrams(flips[:1], 3)
    entropy = -(0.2 * math.log2(0.2) + 0.8 * math.log2(0.8))
    assert model.bits_per_byte(flips[1:]) == pytest.approx(entropy, abs=0.01)


def test_a_higher_order_predicts_a_program_better(tmp_path: Path) -> None:
    text = Path(random.__file__).read_bytes()
    training, other = [text[: len(text) // 2]], [text[len(text) // 2 :]]
    bits = [train_ngrams(training, order).bits_per_byte(other) for order in (2, 4, 6)]
    assert bits[0] > bits[1] > bits[2]
    model = train_ngrams(training, 4)
    model.save(tmp_path / "model.safetensors")
    assert NgramModel.load(tmp_path / "model.safetensors").bits(other).tolist() == model.bits(other).tolist()
    assert model.n_bytes < training_bytes(len(training[0]), 4)


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    train_ngrams(sentences(3, 20), 3).save(path)
    data, draw = bytearray(path.read_bytes()), random.Random(0)
    refused = 0
    for _ in range(60):
        place, value = draw.randrange(len(data)), draw.randrange(256)
        damaged = data.copy()
        damaged[place] = value
        path.write_bytes(damaged)
        try:
            model = NgramModel.load(path)
        except CorruptFile:
            refused += 1
        else:
            # What is read can be scored, whatever it says.
            assert np.isfinite(model.bits(sentences(4, 5))).all()
    assert refused > 10
    with pytest.raises(NapkinError, match="use 2 to 8"):
        train_ngrams([b"a"], 9)
    with pytest.raises(NapkinError, match="no text"):
        train_ngrams([b""])
    with pytest.raises(NapkinError, match="the byte 255"):
        train_ngrams([b"a\xff"])
