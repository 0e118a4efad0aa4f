"""Importance resampling is its definition, whatever the shards, and draws in proportion to the weights."""

import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest

from curation.deduplication.test_document_stages import decided
from napkin.curation import Dropped, Record
from napkin.curation.filters.importance import ImportanceResampling, _uniform
from napkin.curation.filters.quality_model import hashed_ngrams
from napkin.errors import NapkinError


def documents(n: int) -> list[Record]:
    draw = random.Random(2)
    kinds = (["proof", "theorem", "word", "length", "by"], ["click", "win", "prize", "now", "by"])
    return [Record(f"in#{i}", " ".join(draw.choices(kinds[i % 2], k=draw.randrange(7)))) for i in range(n)]


@pytest.fixture
def target(tmp_path: Path) -> str:
    lines = [
        json.dumps({"text": "the proof of the theorem, by the length of a word"}),
        json.dumps({"text": "proof by"}),
    ]
    (tmp_path / "target.jsonl").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "target.jsonl")


def plain_weights(records: list[Record], texts: list[str], columns: int, max_n: int) -> list[float]:
    """The formula, with dictionaries."""

    def counted(text: str) -> Counter[int]:
        return Counter(hashed_ngrams(text, columns, max_n).tolist())

    wanted, corpus = Counter[int](), Counter[int]()
    for text in texts:
        wanted.update(counted(text))
    for record in records:
        corpus.update(counted(record.text))

    def share(counts: Counter[int], column: int) -> float:
        return (counts[column] + 1) / (counts.total() + columns)

    return [
        sum(n * math.log(share(wanted, j) / share(corpus, j)) for j, n in counted(record.text).items())
        for record in records
    ]


@pytest.mark.parametrize(("share", "columns", "max_n"), [(0.3, 64, 2), (0.01, 1024, 1), (1.0, 2, 3)])
def test_the_sample_is_that_of_the_formula_whatever_the_shards(
    tmp_path: Path, target: str, share: float, columns: int, max_n: int
) -> None:
    records = documents(200)
    texts = [json.loads(line)["text"] for line in Path(target).read_text().splitlines()]
    weights = plain_weights(records, texts, columns, max_n)
    keys = [w - math.log(-math.log(_uniform(7, r.identity))) for w, r in zip(weights, records, strict=True)]
    wanted = math.ceil(share * 200)
    expected = {records[at].identity for at in sorted(range(200), key=lambda at: -keys[at])[:wanted]}
    stage = ImportanceResampling(target, share, columns=columns, max_n=max_n, seed=7)
    for shards in ([records], [records[:1], records[1:150], [], records[150:]]):
        found = decided(stage, shards, tmp_path / "work")
        assert {name for name, result in found.items() if not isinstance(result, Dropped)} == expected


def test_what_is_like_the_target_is_drawn_in_proportion_to_its_weight(tmp_path: Path, target: str) -> None:
    records = documents(40)
    texts = [json.loads(line)["text"] for line in Path(target).read_text().splitlines()]
    weights = [math.exp(w) for w in plain_weights(records, texts, 64, 2)]
    drawn = Counter[int]()
    # The first of the sample, for many seeds: a draw by the weights.
    logarithms = [math.log(w) for w in weights]
    for seed in range(20_000):
        noise = (-math.log(-math.log(_uniform(seed, record.identity))) for record in records)
        drawn[max(zip(map(float.__add__, logarithms, noise), range(40), strict=True))[1]] += 1
    total = sum(weights)
    chi = sum((drawn[i] - 20_000 * w / total) ** 2 / (20_000 * w / total) for i, w in enumerate(weights))
    # 39 degrees of freedom: beyond 90 in one of a million.
    assert chi < 90
    assert sum(drawn[i] for i in range(0, 40, 2)) > 12_000


def test_wrong_options_and_targets_are_refused(tmp_path: Path, target: str) -> None:
    options = ({"share": 0.0}, {"share": 1.5}, {"columns": 1000}, {"columns": 1}, {"max_n": 0}, {"field": ""})
    for wrong in options:
        with pytest.raises(NapkinError):
            ImportanceResampling(**{"target": target, "share": 0.5, **wrong})
    for path in (str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(NapkinError, match="cannot be read"):
            decided(ImportanceResampling(path, 0.5), [documents(3)], tmp_path / "work")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(NapkinError, match="has no words"):
        decided(ImportanceResampling(str(tmp_path / "empty.txt"), 0.5), [documents(3)], tmp_path / "work")
