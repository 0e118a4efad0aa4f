"""One task of a pipeline: a pass over one shard, or what is decided between two. It leaves a folder, whole or not.

.work/pass-0/00012/            records, summary: what the next pass reads; none in the last one
                               00012-000.jsonl.zst ...: documents, in the last pass
                               dropped.jsonl.zst, set_aside.jsonl, samples.jsonl, counts.json
.work/pass-0/decisions/00012   what the stage after pass 0 decided on the shard
"""

import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from napkin.curation.engine.corpus_writer import Amount, CorpusFile, CorpusWriter, StageBooks, as_zstd
from napkin.curation.engine.pipeline_file import Pipeline
from napkin.curation.engine.samples import Samples
from napkin.curation.reading.bounded_stream import SetAside
from napkin.curation.reading.documents import read_file
from napkin.curation.reading.input_file import InputFile
from napkin.curation.registry import (
    Pass,
    add_to_trace,
    apply_decisions,
    divide_into_passes,
    stage_version,
    summarize_shard,
)
from napkin.curation.stage import CorpusStage, Dropped, Record, RecordStage, read_record_file
from napkin.errors import NapkinError, first_line
from napkin.files import draft_folder, sync_file, sync_folder

DROPPED, SET_ASIDE, SAMPLES, COUNTS = "dropped.jsonl.zst", "set_aside.jsonl", "samples.jsonl", "counts.json"
"""The files that a pass leaves of each shard."""


@dataclass
class Counts:
    """The figures of one shard in one pass."""

    stages: list[StageBooks] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Seconds within each stage."""
    read: Amount = field(default_factory=Amount)
    set_aside: dict[str, int] = field(default_factory=dict)
    files: list[CorpusFile] = field(default_factory=list)


class ShardLog:
    """Applies the stages of a pass to a shard's records, and keeps account in the files of `folder`."""

    def __init__(self, folder: Path, pass_: Pass, samples: int, note: Callable[[str], None]) -> None:
        self.counts = Counts([StageBooks(each.name, stage_version(each)) for each in pass_.all_stages])
        self.counts.seconds = [0.0] * len(self.counts.stages)
        self.samples = Samples(samples)
        self._pass, self._note = pass_, note
        self._folder = folder
        self._files = files = contextlib.ExitStack()
        self._dropped = files.enter_context(as_zstd(files.enter_context(open(folder / DROPPED, "xb"))))  # noqa: SIM115
        self._set_aside = files.enter_context(open(folder / SET_ASIDE, "xb"))  # noqa: SIM115
        self._reasons: Counter[str] = Counter()

    def read(self, record: Record) -> None:
        """Count a record that enters the pipeline. Raises UnicodeEncodeError for a lone surrogate in its text."""
        self.counts.read.add(size_of(record))

    def through_stages(self, records: Iterable[Record], decisions: Path | None) -> Iterator[Record]:
        """The records that remain after the stages of the pass."""
        decided = self._pass.decided
        if decided is not None:
            assert decisions is not None
            records = self._through_decisions(records, decided, decisions)
        first = 0 if decided is None else 1
        for record in records:
            self._note(record.identity)
            remaining: Record | None = record
            for number, stage in enumerate(self._pass.stages, start=first):
                remaining = self._through_stage(remaining, stage, number)
                if remaining is None:
                    break
            self._note("")
            if remaining is not None:
                yield remaining

    def _through_stage(self, record: Record, stage: RecordStage, number: int) -> Record | None:
        books, entries = self.counts.stages[number], len(record.trace)
        identity, n_bytes = record.identity, size_of(record)
        begin = time.perf_counter()
        try:
            result = stage.apply(record)
            result_bytes = n_bytes if isinstance(result, Dropped) else size_of(result)
        except (NapkinError, MemoryError):
            raise
        except Exception as error:
            how = f"{stage.name}: {type(error).__name__}: {first_line(error)}"
            self.set_aside(SetAside(identity, "stage failed", how, record.offset))
            return None
        self.counts.seconds[number] += time.perf_counter() - begin
        books.entered.add(n_bytes)
        if isinstance(result, Dropped):
            self._drop(record, number, result, n_bytes)
            return None
        add_to_trace(result, stage.name, entries)
        books.remained.add(result_bytes)
        return result

    def _through_decisions(self, records: Iterable[Record], stage: CorpusStage, decisions: Path) -> Iterator[Record]:
        books, begin = self.counts.stages[0], time.perf_counter()
        for record, entries, result in apply_decisions(stage, records, decisions):
            self.counts.seconds[0] += time.perf_counter() - begin
            n_bytes = size_of(record)
            books.entered.add(n_bytes)
            if isinstance(result, Dropped):
                self._drop(record, 0, result, n_bytes)
            else:
                add_to_trace(result, stage.name, entries)
                books.remained.add(size_of(result))
                yield result
            begin = time.perf_counter()

    def _drop(self, record: Record, number: int, why: Dropped, n_bytes: int) -> None:
        books = self.counts.stages[number]
        books.dropped.setdefault(why.rule, Amount()).add(n_bytes)
        line = {
            "identity": record.identity,
            "stage": books.name,
            "rule": why.rule,
            "detail": why.detail,
            "source": record.source,
            "offset": record.offset,
            "address": record.address,
            "trace": [{"stage": entry.stage, "note": entry.note} for entry in record.trace],
        }
        self._dropped.write(msgspec.json.encode(line) + b"\n")
        self.samples.offer(record, self._pass.first_stage + number, why.rule, why.detail)

    def set_aside(self, what: SetAside) -> None:
        """Write a line of something that does not go through the pipeline."""
        self._reasons[what.reason] += 1
        # A name from outside may be anything, as may what libraries say.
        values = {name: _clean(getattr(what, name)) for name in ("identity", "reason", "detail", "offset")}
        self._set_aside.write(msgspec.json.encode(values) + b"\n")

    def finish(self, files: list[CorpusFile]) -> None:
        """Write the counts and samples, and close the files."""
        self.counts.files = files
        self.counts.set_aside = dict(sorted(self._reasons.items()))
        self.close()
        with open(self._folder / SAMPLES, "xb") as file:
            file.writelines(msgspec.json.encode(sample) + b"\n" for sample in self.samples.sorted())
        (self._folder / COUNTS).write_bytes(msgspec.json.encode(self.counts))

    def close(self) -> None:
        """Close the files; what follows is an error."""
        self._files.close()


def size_of(record: Record) -> int:
    """Bytes of a record's text as UTF-8, and of its content. Raises UnicodeEncodeError for a lone surrogate."""
    text = record.text
    return len(record.content) + (len(text) if text.isascii() else len(text.encode()))


def _clean(value: Any) -> Any:
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


RECORDS, SUMMARY, DECISIONS = "records", "summary", "decisions"


@dataclass(frozen=True)
class ShardTask:
    """A pass over one shard."""

    pass_number: int
    shard: int
    files: tuple[InputFile, ...] = ()
    """The files that the first pass reads."""
    skipped: tuple[str, ...] = ()
    """Documents, by identity or place, that ended a worker twice, as `note` was told of them."""


@dataclass(frozen=True)
class DecisionTask:
    """The decisions after a pass, made upon the summaries of all shards."""

    pass_number: int
    n_shards: int


Task = ShardTask | DecisionTask


def folder_of(work: Path, task: Task) -> Path:
    folder = work / f"pass-{task.pass_number}"
    return folder / (DECISIONS if isinstance(task, DecisionTask) else f"{task.shard:05d}")


def do_task(pipeline: Pipeline, work: Path, task: Task, note: Callable[[str], None]) -> None:
    """Do a task, unless it has been done. `note` is told what is being worked on, and nothing in between.

    Raises NapkinError for what a user can put right, OSError where the disk is full.
    """
    target = folder_of(work, task)
    if target.is_dir():
        return
    with draft_folder(target) as draft:
        if isinstance(task, DecisionTask):
            _decide(pipeline, work, task, draft)
        else:
            _work_on_shard(pipeline, work, task, draft, note)
        for path in draft.iterdir():
            sync_file(path)
        sync_folder(draft)
        try:
            os.rename(draft, target)
        except OSError:
            # A process that was left behind by a killed command may have been faster.
            if not target.is_dir():
                raise
    sync_folder(target.parent)


def _decide(pipeline: Pipeline, work: Path, task: DecisionTask, draft: Path) -> None:
    stage = divide_into_passes(pipeline.stages)[task.pass_number].summarized
    assert stage is not None
    scratch = draft / "scratch"
    scratch.mkdir()
    shards = range(task.n_shards)
    summaries = [folder_of(work, ShardTask(task.pass_number, shard)) / SUMMARY for shard in shards]
    stage.decide(summaries, [draft / f"{shard:05d}" for shard in shards], scratch, pipeline.memory_bytes)
    shutil.rmtree(scratch)


def _work_on_shard(pipeline: Pipeline, work: Path, task: ShardTask, draft: Path, note: Callable[[str], None]) -> None:
    pass_ = divide_into_passes(pipeline.stages)[task.pass_number]
    log = ShardLog(draft, pass_, pipeline.output.samples, note)
    try:
        files = _through_pass(pipeline, work, task, pass_, draft, log, note)
        log.finish(files)
    finally:
        log.close()


def _through_pass(
    pipeline: Pipeline,
    work: Path,
    task: ShardTask,
    pass_: Pass,
    draft: Path,
    log: ShardLog,
    note: Callable[[str], None],
) -> list[CorpusFile]:
    if task.pass_number == 0:
        read = _without_skipped(_read(pipeline, task, log, note), task, log)
        records, decisions = read, None
    else:
        before = folder_of(work, ShardTask(task.pass_number - 1, task.shard))
        records = _without_skipped(read_record_file(before / RECORDS), task, log)
        decisions = folder_of(work, DecisionTask(task.pass_number - 1, 0)) / f"{task.shard:05d}"
    remaining = log.through_stages(records, decisions)
    if pass_.summarized is not None:
        summarize_shard(remaining, pass_.summarized, draft / RECORDS, draft / SUMMARY)
        return []
    writer = CorpusWriter(draft, task.shard, pipeline.output.format, pipeline.output.shard_bytes)
    for record in remaining:
        if record.content and not record.text:
            how = f"no stage made text of {record.media_type}"
            log.set_aside(SetAside(record.identity, "no text", how, record.offset))
            continue
        writer.write(record, record.text.encode())
        log.samples.offer(record)
    writer.close()
    return writer.files


def _read(pipeline: Pipeline, task: ShardTask, log: ShardLog, note: Callable[[str], None]) -> Iterator[Record]:
    options = pipeline.input
    for file in task.files:
        number = 0
        found = read_file(file, options.limits, options.text_field)
        while True:
            # What ends a worker may be the reading of a file, after so many documents.
            place = f"{file.name}#>{number}"
            if place in task.skipped:
                log.set_aside(SetAside(file.name, "ended a worker", f"reading on after {number:,} documents"))
                break
            note(place)
            record = next(found, None)
            note("")
            if record is None:
                break
            number += 1
            if isinstance(record, SetAside):
                log.set_aside(record)
                continue
            record.licence = record.licence or options.licence
            try:
                log.read(record)
            except UnicodeEncodeError:
                log.set_aside(SetAside(record.identity, "broken encoding", "a lone surrogate", record.offset))
                continue
            yield record


def _without_skipped(records: Iterator[Record], task: ShardTask, log: ShardLog) -> Iterator[Record]:
    for record in records:
        if record.identity in task.skipped:
            log.set_aside(SetAside(record.identity, "ended a worker", "twice", record.offset))
        else:
            yield record
