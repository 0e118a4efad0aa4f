"""A plan from a sample is held against the whole corpus."""

import gzip
import random
import sys
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napkin.curation import Record
from napkin.curation.engine import corpus_plan, input_sample
from napkin.curation.engine.corpus_plan import CorpusPlan, Estimate, plan_corpus, read_plan, reconcile
from napkin.curation.engine.input_sample import draw_files
from napkin.curation.engine.pipeline_file import InputOptions, Pipeline
from napkin.curation.engine.pipeline_run import curate
from napkin.curation.reading.input_file import InputFile, find_files
from napkin.curation.registry import make_stage
from napkin.errors import NapkinError
from napkin.json_files import write_json

zstandard = pytest.importorskip("zstandard")
STAGES = ("length", "duplicates")


@pytest.fixture(autouse=True)
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_sample, "LEAST_BYTES", 2**14)
    monkeypatch.setattr(input_sample, "_LEAST_PART_BYTES", 2**12)
    monkeypatch.setattr(input_sample, "_LEAST_POINTS", 30)


def write_corpus(folder: Path, seed: int) -> Path:
    """Files of very different sizes, documents of very different lengths, some of them the same."""
    chance = random.Random(seed)
    folder.mkdir()
    seen: list[str] = ["a text that is here several times " * 9]
    for number in range(chance.choice([60, 100])):
        typical = chance.choice([40, 300, 900])
        with open(folder / f"{number:03d}.jsonl", "wb") as file:
            for _ in range(chance.randrange(1, 60)):
                text = f"{chance.random()} " + "word " * int(chance.expovariate(5 / typical))
                if chance.random() < 0.02:
                    text = chance.choice(seen)
                elif chance.random() < 0.1:
                    seen.append(text)
                file.write(msgspec.json.encode({"text": text}) + b"\n")
    return folder


def pipeline_of(folder: Path, stages: tuple[str, ...] = STAGES) -> Pipeline:
    options = {"length": {"least": 200}}
    made = tuple(make_stage(name, options.get(name, {})) for name in stages)
    return Pipeline(InputOptions((str(folder),)), made)


@pytest.mark.thorough
def test_true_figures_are_in_nine_of_ten_intervals(tmp_path: Path) -> None:
    inside: list[bool] = []
    for seed in range(8):
        folder = write_corpus(tmp_path / f"{seed}", seed)
        files = [each for each in find_files([str(folder)]) if isinstance(each, InputFile)]
        plan = plan_corpus(pipeline_of(folder), share=0.15)
        whole = plan_corpus(pipeline_of(folder), share=1.0)
        assert plan.sampled_files < len(files) / 2
        for planned, true in ((plan.read, whole.read), (plan.stages[0].remained, whole.stages[0].remained)):
            for figure in ("documents", "bytes"):
                estimate, value = getattr(planned, figure), getattr(true, figure).value
                inside.append(estimate.low <= value <= estimate.high)
    # 32 figures of 8 corpora, always the same ones.
    assert sum(inside) >= 27


@pytest.mark.thorough
def test_a_sample_of_everything_is_what_the_pipeline_makes(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "in", 3)
    pipeline = pipeline_of(folder)
    plan = plan_corpus(pipeline, share=1.0, workers=2, dollars_per_core_hour=0.05)
    assert plan.sampled_share == 1
    assert plan.dollars == pytest.approx(plan.seconds * 2 / 3600 * 0.05)
    curate(pipeline, tmp_path / "corpus")
    write_json(tmp_path / "plan.json", plan)
    reconciled = reconcile(tmp_path / "corpus", read_plan(tmp_path / "plan.json"))
    assert [row.planned.value for row in reconciled.rows] == [row.metered for row in reconciled.rows]
    assert all(row.is_inside for row in reconciled.rows)
    assert [name for name, _, _ in reconciled.stage_seconds] == ["length"]
    assert plan.stages[0].dropped.keys() == {"too short"}


def test_duplicates_that_a_sample_hardly_shows_are_in_the_interval(tmp_path: Path) -> None:
    """Each text stands twice, far apart: a sample of a tenth finds one pair in ten."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(400):
        (folder / f"{number:03d}.txt").write_text(f"document {number % 200} " * 40)
    plan = plan_corpus(pipeline_of(folder, ("duplicates",)), share=0.1)
    remained = plan.stages[0].remained.documents
    assert plan.stages[0].compares
    assert remained.low <= 200 <= remained.high
    assert remained.low < remained.value < remained.high


def test_files_are_drawn_by_their_bytes_and_stand_for_all_of_them() -> None:
    files = [InputFile(f"{number}", "jsonl", size, "") for number, size in enumerate([10, 10**6, 500, 3 * 10**6] * 50)]
    drawn = draw_files(files, 0.01)
    total = sum(file.bytes for file in files)
    assert sum(stands_for for _, stands_for, _ in drawn) == pytest.approx(total)
    assert {file.bytes for file, _, _ in drawn} <= {10**6, 3 * 10**6, 500}
    of_large = sum(stands_for for file, stands_for, _ in drawn if file.bytes == 3 * 10**6)
    assert of_large / total == pytest.approx(0.75, abs=0.03)
    assert drawn == draw_files(files, 0.01)


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 2**30)), min_size=1, max_size=8),
    st.floats(1e-4, 1),
)
@settings(max_examples=100)
def test_a_sample_never_reads_more_bytes_than_it_may(groups: list[tuple[int, int]], share: float) -> None:
    files = [
        InputFile(f"{group}-{n}", "jsonl", size, "") for group, (count, size) in enumerate(groups) for n in range(count)
    ]
    drawn = draw_files(files, share)
    assert sum(most for _, _, most in drawn) <= input_sample.MOST_BYTES
    assert sum(stands_for for _, stands_for, _ in drawn) == pytest.approx(sum(file.bytes for file in files))
    assert all(most for _, _, most in drawn)


ZIPPED = {"": bytes, ".gz": gzip.compress, ".zst": lambda data: zstandard.ZstdCompressor().compress(data)}


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("length", [300, 30_000])
def test_a_sample_holds_what_it_may_and_still_tells_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, length: int
) -> None:
    """4.8 MB of documents, of which 400 kB may be held: compressed they are a tenth, and read ahead in large blocks."""
    monkeypatch.setattr(input_sample, "MOST_BYTES", 400_000)
    chance = random.Random(5)
    for number in range(40):
        texts = [f"{chance.random()} " + "word " * (length // 5) for _ in range(120_000 // length)]
        lines = b"".join(msgspec.json.encode({"text": text}) + b"\n" for text in texts)
        (tmp_path / f"{number}.jsonl{ending}").write_bytes(ZIPPED[ending](lines))
    files = [each for each in find_files([str(tmp_path)]) if isinstance(each, InputFile)]
    sample = input_sample.read_sample(files, InputOptions((str(tmp_path),)), 1.0, lambda *_: None)
    assert sum(sys.getsizeof(record.text) for each in sample for record in each.records) <= 400_000
    assert sum(each.stands_for_bytes for each in sample) == pytest.approx(sum(file.bytes for file in files))
    estimate = sum(len(each.records) * each.weight for each in sample)
    assert estimate == pytest.approx(40 * (120_000 // length), rel=0.1)


def test_a_sample_of_parquet_is_by_rows_though_a_group_of_rows_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(input_sample, "MOST_BYTES", 200_000)
    for number in range(6):
        texts = [f"{number} {row} " + "word " * 100 for row in range(2000)]
        parquet.write_table(arrow.table({"text": texts}), tmp_path / f"{number}.parquet")
    plan = plan_corpus(Pipeline(InputOptions((str(tmp_path),)), ()), share=0.5)
    assert plan.read.documents.value == pytest.approx(12_000, rel=0.15)
    assert plan.read.bytes.value == pytest.approx(12_000 * 507, rel=0.15)


@pytest.mark.parametrize("line", [b"x" * 3_000_000 + b"\n", b"not JSON\n" * 300_000])
def test_a_file_without_a_document_is_not_read_whole(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(line * 2)
    file, drawn = find_files([str(tmp_path)]), []
    options = InputOptions((str(tmp_path),), document_bytes=1000)
    (found,) = (each for each in file if isinstance(each, InputFile))
    sampled = input_sample._read(found, found.bytes, 2**12, (2**20, 2**20), options)
    assert sampled is not None
    assert (sampled.records, sampled.read_bytes < 2_000_000) == (drawn, True)


class SlowAtFirst:
    """A stage on a clock of its own: a document takes a second per character, the first uses many more."""

    name: ClassVar[str] = "slow at first"

    def __init__(self, clock: list[float]) -> None:
        self._clock, self._seen = clock, set[object]()

    def apply(self, record: Record) -> Record:
        for use in (record.media_type, len(record.text) > 30):
            if use not in self._seen:
                self._clock[0] += 10_000
            self._seen.add(use)
        self._clock[0] += len(record.text)
        return record


def test_the_price_of_a_stage_is_without_what_is_compiled_at_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first document is short: what a long one needs, or a page, is compiled at a later one."""
    clock = [0.0]
    monkeypatch.setattr(corpus_plan.time, "perf_counter", lambda: clock[0])
    texts = ["short", *(f"{n} a document that is longer than the first" for n in range(40))]
    (tmp_path / "a.jsonl").write_bytes(b"".join(msgspec.json.encode({"text": text}) + b"\n" for text in texts))
    (tmp_path / "b.html").write_text("<p>a page</p>")
    plan = plan_corpus(Pipeline(InputOptions((str(tmp_path),)), (SlowAtFirst(clock),)), share=1.0)
    assert plan.stages[0].seconds == pytest.approx(sum(map(len, texts)))


@pytest.mark.thorough
def test_a_plan_neither_makes_an_index_nor_adds_to_one(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "in", 2)
    index = tmp_path / "index"

    def pipeline(paths: Path) -> Pipeline:
        return Pipeline(InputOptions((str(paths),)), (make_stage("duplicates", {"index": str(index)}),))

    plan_corpus(pipeline(folder), share=1.0)
    assert not index.exists()
    curate(pipeline(folder), tmp_path / "first")
    before = sorted(path for path in index.rglob("*"))
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.jsonl").write_text('{"text": "a text that is new"}\n')
    (tmp_path / "more" / "a.jsonl").write_bytes((folder / "000.jsonl").read_bytes())
    # What stands in the index is dropped in the plan, too.
    assert plan_corpus(pipeline(tmp_path / "more"), share=1.0).stages[0].remained.documents.value == 1
    assert sorted(path for path in index.rglob("*")) == before


def test_a_plan_of_other_stages_is_refused(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "in", 1)
    curate(pipeline_of(folder, ("length",)), tmp_path / "corpus")
    plan = plan_corpus(pipeline_of(folder), share=1.0)
    with pytest.raises(NapkinError, match="length, duplicates"):
        reconcile(tmp_path / "corpus", plan)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_impossible_shares_are_refused(tmp_path: Path, share: float) -> None:
    with pytest.raises(NapkinError, match="share above 0, at most 1"):
        plan_corpus(pipeline_of(write_corpus(tmp_path / "in", 1)), share=share)


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = plan_corpus(pipeline_of(write_corpus(tmp_path / "in", 5)), share=0.2)
    write_json(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == plan
    assert isinstance(plan, CorpusPlan)
    assert isinstance(plan.read.tokens, Estimate)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(NapkinError):
        read_plan(tmp_path / "other.json")
