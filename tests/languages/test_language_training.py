"""Training on small folders, calibration on synthetic logits, and what a folder of texts may be."""

import numpy as np
import pytest

from napkin.errors import NapkinError
from napkin.languages import LanguageTraining, reliability, train_languages
from napkin.languages.training import least_cross_entropy, read_training_texts, scanned

SMALL = LanguageTraining(row_bits=10, examples=400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three invented languages of 40 words each, which share letters but not words, and one of another script."""
    folder = tmp_path_factory.mktemp("texts")
    random = np.random.default_rng(7)
    for code, letters in {"aa": "aeioust", "bb": "aeiklmn", "cc": "aeiprzv", "dd": "абвгдеж"}.items():
        words = ["".join(random.choice(list(letters), 5)) for _ in range(40)]
        lines = [" ".join(random.choice(words, 8)) for _ in range(200)]
        if code == "bb":
            (folder / code).mkdir()
            (folder / code / "one.txt").write_text("\n".join(lines[:50]), "utf-8")
            (folder / code / "two.txt").write_text("\n".join(lines[50:]), "utf-8")
        else:
            (folder / f"{code}.txt").write_text("\n".join(lines), "utf-8")
    return folder


def test_trained_classifier_tells_the_languages_of_the_folder(folder) -> None:
    classifier = train_languages(folder, SMALL)
    assert classifier.languages == ("aa", "bb", "cc", "dd")
    for code, paragraphs in read_training_texts(folder, 10_000, seed=3):
        assert [classifier.identify(text).language for text in paragraphs[:20]] == [code] * 20


def test_training_twice_gives_the_same_file(folder, tmp_path) -> None:
    for name in ("first", "second"):
        train_languages(folder, SMALL).save(tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_each_step_lowers_the_loss_as_its_gradient_says(folder) -> None:
    # More examples of the same texts are more steps: the probability of held-out words rises.
    texts = read_training_texts(folder, 10_000, seed=3)
    few, many = (train_languages(folder, LanguageTraining(row_bits=10, examples=n)) for n in (2, 400))

    def right(classifier) -> int:
        return sum(classifier.identify(t, 0).language == code for code, lines in texts for t in lines)

    assert right(few) < right(many) == sum(len(lines) for _, lines in texts)


def test_fitted_sharpness_is_that_of_the_labels() -> None:
    # Labels are drawn from softmax(logits · exp(a + b ln n)) with known a and b.
    random = np.random.default_rng(1)
    logits = random.normal(size=(40_000, 5)).astype(np.float32)
    lengths = random.integers(1, 400, 40_000)
    scores = logits * np.exp(0.3 - 0.2 * np.log(lengths))[:, None]
    labels = (scores + random.gumbel(size=scores.shape)).argmax(axis=1)
    assert least_cross_entropy(logits, labels, lengths) == pytest.approx((0.3, -0.2), abs=0.05)


def test_reliability_of_known_guesses() -> None:
    rows, error = reliability([0.95] * 10 + [0.55] * 10, [True] * 9 + [False] + [True] * 3 + [False] * 7)
    assert [(row.guesses, row.right) for row in rows] == [(10, 0.3), (10, 0.9)]
    assert error == pytest.approx((abs(0.55 - 0.3) + abs(0.95 - 0.9)) / 2)


def test_words_of_paragraphs_are_where_they_stand() -> None:
    texts = scanned("en", ["It's  2 o'clock", "…", "Émile"])
    stops = [2, 4, 8, 14, 22]
    found = ["".join(map(chr, texts.points[a:b])) for a, b in zip(texts.word_starts, stops, strict=True)]
    assert found == ["it", "s", "o", "clock", "émile"]
    assert texts.first_words.tolist() == [0, 4, 4, 5]


def test_what_is_no_folder_of_texts_is_named(tmp_path) -> None:
    with pytest.raises(NapkinError, match="is not a folder"):
        train_languages(tmp_path / "none", SMALL)
    with pytest.raises(NapkinError, match="texts of 0 languages"):
        train_languages(tmp_path, SMALL)
    (tmp_path / "english.txt").write_text("one two three")
    with pytest.raises(NapkinError, match="not named for a language"):
        train_languages(tmp_path, SMALL)
    (tmp_path / "english.txt").rename(tmp_path / "en.txt")
    (tmp_path / "de.txt").write_bytes(b"eins zwei \xff")
    with pytest.raises(NapkinError, match=r"de\.txt'.*UTF-8.*byte 10"):
        train_languages(tmp_path, SMALL)
    (tmp_path / "SOURCES").write_text("written for this test")
    (tmp_path / "de.txt").write_text(" \n12 34\n")
    with pytest.raises(NapkinError, match=r"de\.txt'.*words"):
        train_languages(tmp_path, SMALL)
