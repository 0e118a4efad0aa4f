"""A plan from a sample is held against the whole corpus."""

import random
from pathlib import Path

import msgspec
import pytest

from napkin.curation import input_sample
from napkin.curation.corpus_plan import CorpusPlan, Estimate, plan_corpus
from napkin.curation.input_sample import draw_files
from napkin.curation.pipeline_file import InputOptions, Pipeline
from napkin.curation.pipeline_run import run_pipeline
from napkin.curation.reading.input_file import InputFile, find_files
from napkin.curation.reconciliation import read_plan, reconcile
from napkin.curation.registry import make_stage
from napkin.errors import NapkinError
from napkin.runs.json_file import write_json

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


def test_a_sample_of_everything_is_what_the_pipeline_makes(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "in", 3)
    pipeline = pipeline_of(folder)
    plan = plan_corpus(pipeline, share=1.0, workers=2, dollars_per_core_hour=0.05)
    assert plan.sampled_share == 1
    assert plan.dollars == pytest.approx(plan.seconds * 2 / 3600 * 0.05)
    run_pipeline(pipeline, tmp_path / "corpus")
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


def test_a_plan_of_other_stages_is_refused(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "in", 1)
    run_pipeline(pipeline_of(folder, ("length",)), tmp_path / "corpus")
    plan = plan_corpus(pipeline_of(folder), share=1.0)
    with pytest.raises(NapkinError, match="the plan is for the stages length, duplicates"):
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
