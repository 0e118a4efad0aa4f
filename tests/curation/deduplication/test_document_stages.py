"""Duplicate documents: one of each cluster stays, whatever the shards, their order, the memory and the runs."""

import random
import shutil
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from napkin.curation import CorpusStage, Dropped, Record
from napkin.curation.deduplication import near_duplicates
from napkin.curation.deduplication.shard_files import KeyChunk, KeyFile, KeyHeader, write_keys
from napkin.curation.deduplication.stages import Duplicates, NearDuplicates
from napkin.errors import NapkinError

MEMORY = 2**26


def edited_records(count: int, prefix: str = "in", seed: int = 6) -> list[Record]:
    """Documents, each an edit of one before it or a new one, some of them longer."""
    draw = random.Random(seed)
    texts: list[str] = []
    for _ in range(count):
        if texts and draw.random() < 0.6:
            words = draw.choice(texts).split()
            words[draw.randrange(len(words))] = f"new{draw.randrange(10)}"
            words += ["more"] * draw.randrange(2)
        else:
            words = [f"w{draw.randrange(500)}" for _ in range(draw.randrange(1, 150))]
        texts.append(" ".join(words))
    return [Record(f"{prefix}#{number}", text) for number, text in enumerate(texts)]


def decided(
    stage: CorpusStage, shards: Sequence[list[Record]], folder: Path, memory: int = MEMORY
) -> dict[str, str | Dropped]:
    """What becomes of each document: its text, or why it was dropped."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "scratch").mkdir(parents=True)
    summaries = [folder / f"summary-{number}" for number in range(len(shards))]
    decisions = [folder / f"decisions-{number}" for number in range(len(shards))]
    for shard, summary in zip(shards, summaries, strict=True):
        stage.summarize(shard, summary)
    stage.decide(summaries, decisions, folder / "scratch", memory)
    found: dict[str, str | Dropped] = {}
    for shard, decision in zip(shards, decisions, strict=True):
        copies = [Record(record.identity, record.text) for record in shard]
        for record, result in zip(shard, stage.apply(copies, decision), strict=True):
            found[record.identity] = result if isinstance(result, Dropped) else result.text
    return found


def dropped(found: dict[str, str | Dropped]) -> dict[str, str]:
    return {name: result.detail for name, result in found.items() if isinstance(result, Dropped)}


@pytest.mark.thorough
def test_of_each_cluster_the_longest_stays_and_of_those_the_one_with_the_smallest_identity(tmp_path: Path) -> None:
    records = edited_records(300)
    found = dropped(decided(NearDuplicates(), [records], tmp_path / "a"))
    expected = {}
    for cluster in near_duplicates(record.text for record in records):
        best = min(cluster, key=lambda number: (-len(records[number].text), records[number].identity))
        expected |= {records[n].identity: f"{records[best].identity} stays" for n in cluster if n != best}
    assert len(expected) > 50
    assert found == expected


def test_the_first_stays_where_that_is_chosen(tmp_path: Path) -> None:
    shards = [[Record("b#0", "one  two"), Record("b#1", "three")], [Record("a#0", "one two"), Record("a#1", "")]]
    assert dropped(decided(Duplicates(keep="first"), shards, tmp_path)) == {"a#0": "b#0 stays"}
    assert dropped(decided(Duplicates(), shards, tmp_path)) == {"a#0": "b#0 stays"}
    shards[0][0].text = "one two"
    assert dropped(decided(Duplicates(), shards, tmp_path)) == {"b#0": "a#0 stays"}


@pytest.mark.parametrize("stage", [Duplicates(), NearDuplicates(threshold=0.7)])
def test_the_result_does_not_depend_on_shards_their_order_or_memory(stage: CorpusStage, tmp_path: Path) -> None:
    records = edited_records(400)
    records += [Record(f"again#{n}", record.text) for n, record in enumerate(records[::3])]
    alone = decided(stage, [records], tmp_path / "alone")
    assert len(dropped(alone)) > 100
    random.Random(7).shuffle(records)
    shards = [records[:0], *(records[start::7] for start in range(7))]
    assert decided(stage, shards, tmp_path / "shards", memory=2**23) == alone


def test_a_later_run_against_an_index_is_decided_like_one_run_in_which_the_old_come_first(tmp_path: Path) -> None:
    records = edited_records(450)
    crawls = [records[:150], records[150:300], records[300:]]
    index = str(tmp_path / "index")
    before: set[str] = set()
    for number, crawl in enumerate(crawls):
        so_far = [record for each in crawls[: number + 1] for record in each]
        one_run = dropped(decided(NearDuplicates(keep="first"), [so_far], tmp_path / "one"))
        names = {record.identity for record in crawl}
        found = dropped(decided(NearDuplicates(index=index), [crawl[:70], crawl[70:]], tmp_path / "run"))
        # Which one stays of a cluster of new documents alone is chosen by length; how many go does not depend on it.
        old = {name for name in found if found[name].removesuffix(" stays") in before}
        in_one_run = {name for name in names & one_run.keys() if one_run[name].removesuffix(" stays") in before}
        assert len(found) == len(names & one_run.keys())
        assert old == in_one_run
        assert number == 0 or old
        before |= names
        # The same run again, as after a kill, is compared with those before it alone.
        again = decided(NearDuplicates(index=index), [crawl[70:], crawl[:70]], tmp_path / "run")
        assert dropped(again) == found
    assert len(list(Path(index).glob("0*"))) == 3


def test_an_index_of_other_options_is_refused(tmp_path: Path) -> None:
    index = str(tmp_path / "index")
    decided(NearDuplicates(index=index), [[Record("a#0", "text")]], tmp_path / "run")
    with pytest.raises(NapkinError, match="use the same options"):
        decided(NearDuplicates(index=index, words=3), [[Record("a#0", "text")]], tmp_path / "run")


@pytest.mark.thorough
def test_the_memory_that_was_set_is_held(tmp_path: Path) -> None:
    count, memory = 160_000, 2**23
    summary, decision, scratch = tmp_path / "summary", tmp_path / "decision", tmp_path / "scratch"
    scratch.mkdir()
    draw = np.random.default_rng(8)
    # A third of the documents is one and the same.
    keys = draw.integers(1, count * 10, (2, count, 1)).astype(np.uint64)
    keys *= np.uint64(0x9E3779B97F4A7C15)
    keys[:, ::3] = 5
    step = 40_000
    chunks = (
        KeyChunk([f"in#{n}" for n in part], np.ones(step, np.int64), keys[:, part.start : part.stop])
        for part in (range(start, start + step) for start in range(0, count, step))
    )
    write_keys(summary, KeyHeader("test", tables=2, width=1), chunks)
    Duplicates().decide([summary], [decision], scratch, 2**30)
    expected = decision.read_bytes()
    decision.unlink()
    for each in scratch.iterdir():
        each.unlink()
    tracemalloc.start()
    try:
        Duplicates().decide([summary], [decision], scratch, memory)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < memory
    assert decision.read_bytes() == expected


def test_damaged_files_are_named(tmp_path: Path) -> None:
    summary = tmp_path / "summary"
    NearDuplicates().summarize(edited_records(20), summary)
    whole = summary.read_bytes()
    assert len(KeyFile(summary)) == 20
    for size in (0, 10, 200, len(whole) - 8, len(whole) - 1):
        summary.write_bytes(whole[:size])
        with pytest.raises(NapkinError, match="whole file"):
            KeyFile(summary)
    decisions = tmp_path / "decisions"
    for text in ("", "{}\n", '{"stage":"duplicates","records":3,"format":"napkin verdicts","version":1}\n[0]\n'):
        decisions.write_text(text)
        with pytest.raises(NapkinError, match="decisions"):
            list(Duplicates().apply([Record("a#0")], decisions))


def test_wrong_options_are_refused() -> None:
    with pytest.raises(NapkinError, match="set both"):
        NearDuplicates(bands=5)
    with pytest.raises(NapkinError, match="more than 128 hashes"):
        NearDuplicates(bands=20, rows=20)
    with pytest.raises(NapkinError, match="threshold is 1"):
        NearDuplicates(threshold=1.0)
