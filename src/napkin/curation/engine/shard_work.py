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
from pathlib import Path

import msgspec

from napkin.curation.engine.corpus_files import (
    COUNTS,
    DROPPED,
    SAMPLES,
    SET_ASIDE,
    Amount,
    CorpusWriter,
    Counts,
    Samples,
    StageBooks,
    as_zstd,
)
from napkin.curation.engine.pipeline_file import Pipeline
from napkin.curation.reading.bounded_stream import SetAside
from napkin.curation.reading.documents import read_file
from napkin.curation.reading.input_file import InputFile
from napkin.curation.registry import (
    add_to_trace,
    apply_decisions,
    divide_into_passes,
    stage_version,
    summarize_shard,
)
from napkin.curation.stage import CorpusStage, Dropped, Record, RecordStage, read_record_file
from napkin.errors import NapkinError, first_line
from napkin.files import draft_folder, sync_file, sync_folder

RECORDS, SUMMARY, DECISIONS = "records", "summary", "decisions"


class ShardTask(msgspec.Struct, frozen=True, tag=True):
    """A pass over one shard."""

    pass_number: int
    shard: int
    files: tuple[InputFile, ...] = ()
    """The files that the first pass reads."""
    skipped: tuple[str, ...] = ()
    """Documents, by identity or place, whose processing ended a worker twice, as reported to `note`."""


class DecisionTask(msgspec.Struct, frozen=True, tag=True):
    """The decisions after a pass, made upon the summaries of all shards."""

    pass_number: int
    n_shards: int


Task = ShardTask | DecisionTask


def folder_of(work: Path, task: Task) -> Path:
    folder = work / f"pass-{task.pass_number}"
    return folder / (DECISIONS if isinstance(task, DecisionTask) else f"{task.shard:05d}")


def do_task(pipeline: Pipeline, work: Path, task: Task, note: Callable[[str], None]) -> None:
    """Do a task, unless it has been done. `note` is called with what is being worked on, and with an empty text in
    between.

    Raises NapkinError for what a user can put right, OSError where the disk is full.
    """
    target = folder_of(work, task)
    if target.is_dir():
        return
    with draft_folder(target) as draft:
        if isinstance(task, DecisionTask):
            _decide(pipeline, work, task, draft)
        else:
            _ShardPass(pipeline, work, task, draft, note).run()
        for path in draft.iterdir():
            sync_file(path)
        sync_folder(draft)
        try:
            os.rename(draft, target)
        except OSError:
            # A leftover process of a killed command may have been faster.
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


class _ShardPass:
    """A pass over one shard: applies its stages to the records, and keeps account in the files of `draft`."""

    def __init__(
        self, pipeline: Pipeline, work: Path, task: ShardTask, draft: Path, note: Callable[[str], None]
    ) -> None:
        self._pipeline, self._work, self._task, self._draft, self._note = pipeline, work, task, draft, note
        self._pass = divide_into_passes(pipeline.stages)[task.pass_number]
        books = [StageBooks(each.name, stage_version(each)) for each in self._pass.all_stages]
        self._counts = Counts(books, [0.0] * len(books))
        self._samples, self._reasons = Samples(pipeline.output.samples), Counter[str]()

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            dropped = stack.enter_context(open(self._draft / DROPPED, "xb"))
            self._dropped = stack.enter_context(as_zstd(dropped))
            self._set_aside_file = stack.enter_context(open(self._draft / SET_ASIDE, "xb"))
            self._write(self._through_stages(self._records()))
        self._counts.set_aside = dict(sorted(self._reasons.items()))
        with open(self._draft / SAMPLES, "xb") as file:
            file.writelines(msgspec.json.encode(sample) + b"\n" for sample in self._samples.sorted())
        (self._draft / COUNTS).write_bytes(msgspec.json.encode(self._counts))

    def _write(self, remaining: Iterator[Record]) -> None:
        if self._pass.summarized is not None:
            summarize_shard(remaining, self._pass.summarized, self._draft / RECORDS, self._draft / SUMMARY)
            return
        output = self._pipeline.output
        writer = CorpusWriter(self._draft, self._task.shard, output.format, output.shard_bytes)
        for record in remaining:
            if record.content and not record.text:
                how = f"no stage made text of {record.media_type}"
                self._set_aside(SetAside(record.identity, "no text", how, record.offset))
                continue
            writer.write(record, record.text.encode())
            self._samples.offer(record)
        writer.close()
        self._counts.files = writer.files

    def _records(self) -> Iterator[Record]:
        """The records that enter the pass's own stages: read, or kept by the pass before and decided upon."""
        task, decided = self._task, self._pass.decided
        if decided is None:
            return self._without_skipped(self._read())
        before = folder_of(self._work, ShardTask(task.pass_number - 1, task.shard))
        decisions = folder_of(self._work, DecisionTask(task.pass_number - 1, 0)) / f"{task.shard:05d}"
        return self._through_decisions(self._without_skipped(read_record_file(before / RECORDS)), decided, decisions)

    def _read(self) -> Iterator[Record]:
        options = self._pipeline.input
        for file in self._task.files:
            number = file.number
            records = read_file(file, options.limits, options.text_field)
            while True:
                # Reading a file may end a worker too, after this many documents.
                place = f"{file.name}#>{number}"
                if place in self._task.skipped:
                    self._set_aside(SetAside(file.name, "ended a worker", f"reading on after {number:,} documents"))
                    break
                self._note(place)
                record = next(records, None)
                self._note("")
                if record is None:
                    break
                number += 1
                if isinstance(record, SetAside):
                    self._set_aside(record)
                    continue
                record.licence = record.licence or options.licence
                try:
                    self._counts.read.add(size_of(record))
                except UnicodeEncodeError:
                    self._set_aside(SetAside(record.identity, "broken encoding", "a lone surrogate", record.offset))
                    continue
                yield record

    def _without_skipped(self, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            if record.identity in self._task.skipped:
                self._set_aside(SetAside(record.identity, "ended a worker", "twice", record.offset))
            else:
                yield record

    def _through_decisions(self, records: Iterable[Record], stage: CorpusStage, decisions: Path) -> Iterator[Record]:
        books, begin = self._counts.stages[0], time.perf_counter()
        for record, entries, result in apply_decisions(stage, records, decisions):
            self._counts.seconds[0] += time.perf_counter() - begin
            n_bytes = size_of(record)
            books.entered.add(n_bytes)
            if isinstance(result, Dropped):
                self._drop(record, 0, result, n_bytes)
            else:
                add_to_trace(result, stage.name, entries)
                books.remained.add(size_of(result))
                yield result
            begin = time.perf_counter()

    def _through_stages(self, records: Iterable[Record]) -> Iterator[Record]:
        first = 0 if self._pass.decided is None else 1
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
        books, entries = self._counts.stages[number], len(record.trace)
        identity, n_bytes = record.identity, size_of(record)
        begin = time.perf_counter()
        try:
            result = stage.apply(record)
            result_bytes = n_bytes if isinstance(result, Dropped) else size_of(result)
        except (NapkinError, MemoryError):
            raise
        except Exception as error:
            how = f"{stage.name}: {type(error).__name__}: {first_line(error)}"
            self._set_aside(SetAside(identity, "stage failed", how, record.offset))
            return None
        self._counts.seconds[number] += time.perf_counter() - begin
        books.entered.add(n_bytes)
        if isinstance(result, Dropped):
            self._drop(record, number, result, n_bytes)
            return None
        add_to_trace(result, stage.name, entries)
        books.remained.add(result_bytes)
        return result

    def _drop(self, record: Record, number: int, why: Dropped, n_bytes: int) -> None:
        books = self._counts.stages[number]
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
        self._samples.offer(record, self._pass.first_stage + number, why.rule, why.detail)

    def _set_aside(self, what: SetAside) -> None:
        self._reasons[what.reason] += 1
        # A name from outside may be anything, as may what libraries say.
        texts = {name: getattr(what, name).encode(errors="replace") for name in ("identity", "reason", "detail")}
        line = {name: text.decode() for name, text in texts.items()} | {"offset": what.offset}
        self._set_aside_file.write(msgspec.json.encode(line) + b"\n")


def size_of(record: Record) -> int:
    """Bytes of a record's text as UTF-8, and of its content. Raises UnicodeEncodeError for a lone surrogate."""
    text = record.text
    return len(record.content) + (len(text) if text.isascii() else len(text.encode()))
