"""Of each line of a corpus the first stays."""

import random
from collections import Counter
from pathlib import Path

import pytest

from curation.deduplication.test_document_stages import decided
from napkin.curation import Dropped, Record
from napkin.curation.deduplication.stages import DuplicateLines
from napkin.errors import NapkinError


def random_records(count: int) -> list[Record]:
    draw = random.Random(9)
    lines = [" ".join(draw.choices(["red", "green", "blue"], k=draw.randrange(12))) for _ in range(60)]
    return [Record(f"in#{n}", "\n".join(draw.choices(lines, k=draw.randrange(6)))) for n in range(count)]


def expected_of(records: list[Record], shortest: int, seen: set[str]) -> dict[str, str | Dropped]:
    found: dict[str, str | Dropped] = {}
    for record in records:
        kept, gone = [], 0
        for line in record.text.split("\n"):
            words = " ".join(line.split())
            if len(line.strip()) < shortest or words not in seen:
                kept.append(line)
                if len(line.strip()) >= shortest:
                    seen.add(words)
            else:
                gone += 1
        text = "\n".join(kept)
        lost = gone and not text.strip()
        found[record.identity] = Dropped("only duplicate lines", f"{gone} lines") if lost else text
    return found


@pytest.mark.parametrize("shards", [1, 4])
def test_the_first_of_equal_lines_stays(shards: int, tmp_path: Path) -> None:
    records = random_records(200)
    per_shard = len(records) // shards
    parts = [records[start : start + per_shard] for start in range(0, len(records), per_shard)]
    found = decided(DuplicateLines(shortest=15), parts, tmp_path)
    assert found == expected_of(records, 15, set())
    assert any(isinstance(each, Dropped) for each in found.values())


@pytest.mark.parametrize("shards", [1, 4])
def test_lines_that_stand_once_in_the_corpus_are_all_that_stays_if_no_copy_is_kept(shards: int, tmp_path: Path) -> None:
    records = random_records(200)
    per_shard = len(records) // shards
    parts = [records[start : start + per_shard] for start in range(0, len(records), per_shard)]
    found = decided(DuplicateLines(shortest=15, keep="none"), parts, tmp_path)
    counts = Counter(" ".join(line.split()) for record in records for line in record.text.split("\n"))
    for record in records:
        lines = record.text.split("\n")
        kept = [line for line in lines if len(line.strip()) < 15 or counts[" ".join(line.split())] == 1]
        gone = len(lines) - len(kept)
        lost = gone and not "".join(kept).strip()
        expected = Dropped("only duplicate lines", f"{gone} lines") if lost else "\n".join(kept)
        assert found[record.identity] == expected


def test_no_copy_of_a_line_of_an_earlier_run_stays_either(tmp_path: Path) -> None:
    stage = DuplicateLines(shortest=1, keep="none", index=str(tmp_path / "index"))
    decided(stage, [[Record("a#1", "once\ntwice\ntwice")]], tmp_path / "run")
    again = decided(stage, [[Record("b#1", "once\ntwice\nnew\nhere\nhere")]], tmp_path / "run")
    assert again == {"b#1": "new"}


def test_lines_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    records = random_records(40)
    stage = DuplicateLines(shortest=15, index=str(tmp_path / "index"))
    seen: set[str] = set()
    for part in (records[:20], records[20:]):
        assert decided(stage, [part], tmp_path / "run") == expected_of(part, 15, seen)


def test_what_was_removed_is_in_the_trace(tmp_path: Path) -> None:
    stage, line = DuplicateLines(shortest=3), "a line of some length"
    record = Record("a#0", f"{line}\nother\n {line}")
    stage.summarize([record], tmp_path / "summary")
    (tmp_path / "scratch").mkdir()
    stage.decide([tmp_path / "summary"], [tmp_path / "decisions"], tmp_path / "scratch", 2**24)
    (kept,) = stage.apply([record], tmp_path / "decisions")
    assert isinstance(kept, Record)
    assert kept.text == f"{line}\nother"
    assert [(entry.stage, entry.note) for entry in kept.trace] == [("duplicate-lines", "1 lines removed")]


def test_lines_of_no_characters_are_refused() -> None:
    with pytest.raises(NapkinError, match="shortest"):
        DuplicateLines(shortest=0)
