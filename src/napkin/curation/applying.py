"""Stages as functions on an iterator of records, without a pipeline's files."""

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from napkin.curation.record import Record, TraceEntry
from napkin.curation.record_file import read_record_file, record_writer
from napkin.curation.registry import Stage
from napkin.curation.stage import CorpusStage, Dropped, RecordStage

MEMORY_BYTES = 2**30
"""What a stage that has to see all shards may hold, unless the user says otherwise."""

OnDrop = Callable[[Record, str, Dropped], None]
"""Called with a record, the stage that dropped it and why."""


def apply_stages(
    records: Iterable[Record], stages: Sequence[Stage], on_drop: OnDrop | None = None, *, memory: int = MEMORY_BYTES
) -> Iterator[Record]:
    """The records that go through all stages, in order, as an iterator; those dropped go to `on_drop`.

    Records pass one at a time. Before a stage that has to see all of them they are kept in a temporary file, as if they
    were one shard; it holds at most `memory` bytes.
    """
    for stage in stages:
        if isinstance(stage, CorpusStage):
            records = _apply_to_corpus(records, stage, on_drop, memory)
        else:
            records = _apply_to_records(records, stage, on_drop)
    return iter(records)


def add_to_trace(record: Record, stage: str, entries_before: int) -> None:
    """Say in a record's trace that it went through a stage, if the stage itself has not said so."""
    if len(record.trace) == entries_before:
        record.trace.append(TraceEntry(stage))


def _apply_to_records(records: Iterable[Record], stage: RecordStage, on_drop: OnDrop | None) -> Iterator[Record]:
    for record in records:
        entries = len(record.trace)
        result = stage.apply(record)
        if isinstance(result, Dropped):
            if on_drop is not None:
                on_drop(record, stage.name, result)
            continue
        add_to_trace(result, stage.name, entries)
        yield result


def _apply_to_corpus(
    records: Iterable[Record], stage: CorpusStage, on_drop: OnDrop | None, memory: int
) -> Iterator[Record]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept, summary, decisions, scratch = (folder / each for each in ("records", "summary", "decisions", "scratch"))
        scratch.mkdir()
        summarize_shard(records, stage, kept, summary)
        stage.decide([summary], [decisions], scratch, memory)
        for before, entries, result in apply_decisions(stage, read_record_file(kept), decisions):
            if isinstance(result, Dropped):
                if on_drop is not None:
                    on_drop(before, stage.name, result)
                continue
            add_to_trace(result, stage.name, entries)
            yield result


def apply_decisions(
    stage: CorpusStage, records: Iterable[Record], decisions: Path
) -> Iterator[tuple[Record, int, Record | Dropped]]:
    """Each record of a shard, the entries that its trace had before the stage, and what the stage makes of it."""
    # A stage gives a result per record, in order, but may read ahead.
    waiting: deque[tuple[Record, int]] = deque()

    def noted() -> Iterator[Record]:
        for record in records:
            waiting.append((record, len(record.trace)))
            yield record

    for result in stage.apply(noted(), decisions):
        if not waiting:
            raise RuntimeError(f"stage '{stage.name}' gives more results than there are records")
        yield (*waiting.popleft(), result)
    if waiting:
        raise RuntimeError(f"stage '{stage.name}' gives no result for '{waiting[0][0].identity}'")


def summarize_shard(records: Iterable[Record], stage: CorpusStage, kept: Path, summary: Path) -> None:
    """Keep a shard's records in a file while a stage summarizes them, in one pass."""
    with record_writer(kept) as writer:

        def kept_records() -> Iterator[Record]:
            for record in records:
                writer.write(record)
                yield record

        passing = kept_records()
        stage.summarize(passing, summary)
        # A stage need not look at all of them.
        for _ in passing:
            pass
