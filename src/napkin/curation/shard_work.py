"""One task of a pipeline: a pass over one shard, or what is decided between two. It leaves a folder, whole or not.

.work/pass-0/00012/            records, summary: what the next pass reads; none in the last one
                               00012-000.jsonl.zst ...: documents, in the last pass
                               dropped.jsonl.zst, set_aside.jsonl, samples.jsonl, counts.json
.work/pass-0/decisions/00012   what the stage after pass 0 decided on the shard
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from napkin.curation.applying import summarize_shard
from napkin.curation.corpus_writer import CorpusWriter
from napkin.curation.manifest import CorpusFile
from napkin.curation.passes import Pass, divide_into_passes
from napkin.curation.pipeline_file import Pipeline
from napkin.curation.reading.documents import read_file
from napkin.curation.reading.input_file import InputFile
from napkin.curation.reading.set_aside import SetAside
from napkin.curation.record import Record
from napkin.curation.record_file import read_record_file
from napkin.curation.shard_log import ShardLog
from napkin.files import draft_folder, sync_file, sync_folder

RECORDS, SUMMARY, DECISIONS = "records", "summary", "decisions"


@dataclass(frozen=True)
class ShardTask:
    """A pass over one shard."""

    pass_number: int
    shard: int
    files: tuple[InputFile, ...] = ()
    """What the first pass reads."""
    skipped: tuple[str, ...] = ()
    """What ended a worker twice, as `note` was told of it."""


@dataclass(frozen=True)
class DecisionTask:
    """What is decided after a pass, upon the summaries of all shards."""

    pass_number: int
    n_shards: int


Task = ShardTask | DecisionTask


def folder_of(work: Path, task: Task) -> Path:
    """The folder that a task leaves."""
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
