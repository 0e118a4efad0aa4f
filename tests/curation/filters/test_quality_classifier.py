"""The classifier separates what can be separated, knows how sure it is, and its file is checked."""

import json
import math
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from napkin.curation import Dropped, Record
from napkin.curation.filters import BestShare, Classifier, QualityModel, train_quality_model
from napkin.curation.filters.quality_model import FORMAT, columns_of, read_quality_model, write_quality_model
from napkin.errors import CorruptFile, NapkinError

VOCABULARY = [f"w{i}" for i in range(40)]


def drawn(seed: int, n: int, tilt: float) -> list[str]:
    """Texts of 30 words; a word's frequency is exp(tilt) times that of the next but 19 for the first 20."""
    choose = random.Random(seed)
    weights = [math.exp(tilt)] * 20 + [1.0] * 20
    return [" ".join(choose.choices(VOCABULARY, weights, k=30)) for _ in range(n)]


def log_odds(text: str, tilt: float) -> float:
    """Of the two ways to draw a text: tilted one way, or the other."""
    return tilt * sum(1 if int(word[1:]) < 20 else -1 for word in text.split())


@pytest.fixture(scope="module")
def trained() -> QualityModel:
    return train_quality_model(drawn(1, 1000, 0.3), drawn(2, 1000, -0.3), columns=2**12, max_n=1)[0]


def test_a_model_of_words_comes_near_the_best_possible_one(trained: QualityModel) -> None:
    # Words are drawn independently, so that the sum of their log odds is the best score there is.
    texts = drawn(3, 1000, 0.3) + drawn(4, 1000, -0.3)
    truth = np.repeat([True, False], 1000)
    best = np.mean((np.array([log_odds(text, 0.3) for text in texts]) > 0) == truth)
    scores = np.array([trained.score(text) for text in texts])
    assert np.mean((scores > 0.5) == truth) > best - 0.05
    assert 0.75 < best < 0.95
    # Among texts with scores around 0.8, some 80% are positives.
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        here = (scores >= low) & (scores < low + 0.2)
        deviation = math.sqrt(0.25 / here.sum())
        assert abs(truth[here].mean() - scores[here].mean()) < 4 * deviation + 0.05


def test_what_is_told_of_held_out_texts_holds_for_new_ones() -> None:
    positives, negatives = drawn(1, 2000, 0.2), drawn(2, 500, -0.2)
    model, held_out = train_quality_model(positives, negatives, columns=2**12, max_n=1)
    assert (held_out.positives, held_out.negatives) == (200, 50)
    right = np.mean([model.score(text) > 0.5 for text in drawn(5, 1000, 0.2)])
    right_negatives = np.mean([model.score(text) <= 0.5 for text in drawn(6, 1000, -0.2)])
    assert abs(held_out.accuracy - (right + right_negatives) / 2) < 0.1
    assert sum(count for *_, count in held_out.bins) == 250
    scores = [[model.score(text) for text in drawn(seed, 200, tilt)] for seed, tilt in ((5, 0.2), (6, -0.2))]
    area = np.mean([[good > bad for good in scores[0]] for bad in scores[1]])
    assert abs(held_out.area_under_curve - area) < 0.1
    # The same texts in another order make the same model.
    again, _ = train_quality_model(positives[::-1], negatives[::-1], columns=2**12, max_n=1)
    assert (again.weights == model.weights).all()


def test_pairs_of_words_tell_what_single_words_do_not() -> None:
    choose = random.Random(0)

    def text(pairs: tuple[str, str]) -> str:
        return " ".join(choose.choice(pairs) + f" f{choose.randrange(1000)}" for _ in range(20))

    positives = [text(("a b", "c d")) for _ in range(200)]
    negatives = [text(("a d", "c b")) for _ in range(200)]
    singles = train_quality_model(positives, negatives, columns=2**14, max_n=1)[1]
    pairs = train_quality_model(positives, negatives, columns=2**14, max_n=2)[1]
    assert singles.accuracy < 0.8
    assert pairs.accuracy == 1.0


def test_columns_are_those_of_another_process() -> None:
    # Files of models depend on these numbers.
    assert columns_of("A cat, a hat", 2**20, 1).tolist() == columns_of("hat cat , A", 2**20, 1).tolist()
    a, b = zlib.crc32(b"a"), zlib.crc32(b"b")
    pair = (a * 0x9E3779B97F4A7C15 + b) % 2**64
    assert columns_of("a b", 2**20, 2).tolist() == sorted(mixed(number) % 2**20 for number in (a, b, pair))
    assert columns_of("", 2**20, 2).tolist() == []


def mixed(number: int) -> int:
    product = number * 0x9E3779B97F4A7C15 % 2**64
    return (product ^ product >> 32) * 0x9E3779B97F4A7C15 % 2**64 >> 32


def test_too_few_texts_are_an_error() -> None:
    with pytest.raises(NapkinError, match=r"19 different negative.*use.*20"):
        train_quality_model(drawn(1, 20, 0.3), drawn(2, 19, 0.3) * 5)
    with pytest.raises(NapkinError, match="columns is 1000"):
        train_quality_model([], [], columns=1000)


def test_a_file_holds_the_model(trained: QualityModel, tmp_path: Path) -> None:
    path = tmp_path / "quality.model"
    write_quality_model(path, trained)
    read = read_quality_model(str(path))
    assert [read.score(text) for text in drawn(7, 10, 0.1)] == [trained.score(text) for text in drawn(7, 10, 0.1)]
    path.write_bytes(path.read_bytes() + b"another")
    with pytest.raises(NapkinError, match="exists"):
        write_quality_model(path, trained)


@pytest.mark.parametrize(
    ("weights", "header"),
    [
        (np.zeros(1000, np.float32), {}),
        (np.zeros(1024, np.float64), {}),
        (np.full(1024, np.nan, np.float32), {}),
        (np.zeros((2, 512), np.float32), {}),
        (np.zeros(1024, np.float32), {"max_n": "99"}),
        (np.zeros(1024, np.float32), {"scale": "inf"}),
        (np.zeros(1024, np.float32), {"shift": "?"}),
        (np.zeros(1024, np.float32), {"format": "another"}),
    ],
)
def test_files_that_are_none_are_refused(tmp_path: Path, weights: np.ndarray, header: dict[str, str]) -> None:
    path = tmp_path / "quality.model"
    save_file({"weights": weights}, path, {"format": FORMAT, "max_n": "2", "scale": "1.0", "shift": "0.0"} | header)
    with pytest.raises(NapkinError, match=r"quality model|damaged"):
        read_quality_model(str(path))


def test_files_that_are_cut_are_refused(trained: QualityModel, tmp_path: Path) -> None:
    path = tmp_path / "quality.model"
    write_quality_model(path, trained)
    whole = path.read_bytes()
    assert set(load_file(path)) == {"weights"}
    cut = tmp_path / "cut.model"
    for length in (0, 7, 100, len(whole) - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptFile):
            read_quality_model(str(cut))


def test_the_stage_scores_and_drops(trained: QualityModel, tmp_path: Path) -> None:
    path = tmp_path / "quality.model"
    write_quality_model(path, trained)
    good, bad = (Record("x#0", drawn(8, 1, tilt)[0]) for tilt in (2.0, -2.0))
    scored = Classifier(str(path)).apply(good)
    assert scored is good
    assert good.fields["quality"] > 0.9
    json.dumps(good.fields)
    low = Classifier(str(path), min_score=0.5).apply(bad)
    assert isinstance(low, Dropped)
    assert low.rule == "low quality"
    high = Classifier(str(path), field="toxicity", max_score=0.5).apply(good)
    assert isinstance(high, Dropped)
    assert high.rule == "high toxicity"


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 1.0])
def test_the_best_share_of_all_shards_is_kept(tmp_path: Path, share: float) -> None:
    choose = random.Random(0)
    numbers = [choose.choice([choose.gauss(0, 1), 0, -0.0, 1e300, -1e-300]) for _ in range(200)]
    records = [Record(f"x#{i}", fields={"quality": number}) for i, number in enumerate(numbers)]
    shards = [records[:50], records[50:50], records[50:]]
    stage = BestShare(share)
    summaries, decisions = ([tmp_path / f"{kind}{i}" for i in range(3)] for kind in "sd")
    for shard, summary in zip(shards, summaries, strict=True):
        stage.summarize(shard, summary)
    stage.decide(summaries, decisions, tmp_path, 2**20)
    results = [result for shard, each in zip(shards, decisions, strict=True) for result in stage.apply(shard, each)]
    least = sorted(numbers)[-math.ceil(share * len(numbers))]
    assert [isinstance(result, Record) for result in results] == [number >= least for number in numbers]


def test_a_field_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(NapkinError, match="'x#0' has no number 'quality'"):
        BestShare(0.5).summarize([Record("x#0")], tmp_path / "summary")
