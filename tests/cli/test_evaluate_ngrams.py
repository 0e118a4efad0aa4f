"""`napkin evaluate ngrams`, and its model beside another one."""

import json
import random
from pathlib import Path

import pytest

from napkin.evaluation.ngrams import train_ngrams


@pytest.fixture
def texts(place: Path) -> None:
    text = Path(random.__file__).read_text()
    Path("a.txt").write_text(text[:20_000])
    Path("b.txt").write_text(text[20_000:26_000])


@pytest.mark.usefixtures("texts")
def test_models_are_trained_kept_and_used(napkin) -> None:
    done = napkin("evaluate", "ngrams", "--train", "a.txt", "--text", "b.txt", "--orders", "2", "5", "--out", "n.model")
    assert done.status == 0, done.err
    assert "2-grams" in done.out
    figures = json.loads(napkin("evaluate", "ngrams", "--model", "n.model", "--text", "b.txt", "--json").out)
    expected = train_ngrams([Path("a.txt").read_bytes()], 5).bits_per_byte([Path("b.txt").read_bytes()])
    assert figures["models"][0]["bits_per_byte"] == pytest.approx(expected, rel=1e-12)
    beside = napkin("evaluate", "text", "runs/tiny", "--text", "b.txt", "--ngrams", "n.model", "--out", "bits.json")
    assert beside.status == 0, beside.err
    assert "n-grams" in beside.out
    assert json.loads(Path("bits.json").read_text())["bits"]["ngram_bits_per_byte"] == pytest.approx(expected, abs=0.1)


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--text b.txt", "name one of --train"),
        ("--train a.txt", "no text to predict"),
        ("--train a.txt --text b.txt --orders 9", "the order of an n-gram model is 9"),
        ("--train a.txt --text b.txt --out one.txt", "'one.txt' exists"),
        ("--model b.txt --text b.txt", "'b.txt' is not an n-gram model"),
        ("--model missing --text b.txt", "'missing' cannot be read"),
    ],
)
def test_what_cannot_be_counted_is_one_line(refusal, arguments: str, complaint: str) -> None:
    assert complaint in refusal("evaluate", "ngrams", *arguments.split())
