"""The stages of pipelines by name; the commands have the same names. A stage is imported when it is used; to add one,
add a line to the table below.

A stage is a frozen dataclass whose fields are its options, each with a docstring below it and a default where one is
sensible; TOML values, checked in `__post_init__`. Its class is imported for the help and for completion in a shell, so
its module imports numpy, numba and other heavy libraries where it uses them. No option may be named as one of
`RESERVED`, which every command of a stage has.

A pipeline goes over its shards in passes: a new one begins at each stage that has to see all of them. `apply_stages`
runs stages on an iterator of records, without a pipeline's files.
"""

import dataclasses
import importlib
import tempfile
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from napkin.curation.stage import CorpusStage, Dropped, Record, RecordStage, TraceEntry, read_record_file, record_writer
from napkin.errors import NapkinError, suggestion

Stage = RecordStage | CorpusStage

RESERVED = frozenset({"paths", "out", "input_format", "output_format", "text_field", "workers", "memory_bytes", "json"})


@dataclass(frozen=True)
class StageEntry:
    """A stage's place, as "module:Class", and a sentence for the list of commands."""

    where: str
    about: str


_STAGES = (
    ("duplicates", "deduplication.stages:Duplicates", "drop documents whose text another has"),
    (
        "bloom-duplicates",
        "deduplication.stages:BloomDuplicates",
        "drop documents whose text stands earlier, in fixed memory",
    ),
    ("near-duplicates", "deduplication.stages:NearDuplicates", "drop documents that are nearly another, by MinHash"),
    ("duplicate-lines", "deduplication.stages:DuplicateLines", "remove lines that stand earlier in the corpus"),
    (
        "duplicate-substrings",
        "deduplication.stages:DuplicateSubstrings",
        "remove passages that stand earlier in the corpus",
    ),
    (
        "conversations",
        "napkin.inference.synthetic_documents:Conversations",
        "have a model ask and answer questions about documents",
    ),
    ("decontaminate", "deduplication.stages:Decontaminate", "drop documents with questions of tasks"),
    ("best-share", "filters.classifier:BestShare", "keep the documents with the highest scores"),
    ("c4", "filters.web_rules:C4", "keep lines that are sentences, by the rules of C4"),
    ("classifier", "filters.classifier:Classifier", "score documents by a model that was trained on your texts"),
    ("fineweb", "filters.web_rules:FineWeb", "drop lists and menus, by FineWeb's own rules"),
    ("gopher", "filters.web_rules:Gopher", "drop what is not prose, by Gopher's rules"),
    (
        "gopher-repetition",
        "filters.web_rules:GopherRepetition",
        "drop documents that repeat themselves, by Gopher's rules",
    ),
    ("host-list", "filters.document_stages:HostList", "drop documents of hosts in a list, or keep only those"),
    ("extract", "filters.document_stages:Extract", "make text of HTML pages and PDFs"),
    (
        "importance-resampling",
        "filters.importance:ImportanceResampling",
        "keep a random share that is distributed like a target",
    ),
    ("language", "filters.document_stages:Language", "find the language of documents, keep some languages"),
    ("length", "filters.document_stages:Length", "drop documents with too few or too many characters"),
    ("perplexity", "filters.perplexity:Perplexity", "score documents by the bits per byte of an n-gram model"),
    ("personal-data", "filters.personal_data:PersonalData", "mask mail addresses, numbers of persons, and keys"),
    ("refinedweb", "filters.web_rules:RefinedWeb", "remove lines of menus and counters, by RefinedWeb's rules"),
    ("rephrase", "napkin.inference.synthetic_documents:Rephrase", "have a model rewrite documents in a style"),
    ("word-list", "filters.document_stages:WordList", "drop documents with words of a list"),
)
# Stages that need a room above this one are named by their whole path.
STAGES = {
    name: StageEntry(where if where.startswith("napkin.") else f"napkin.curation.{where}", about)
    for name, where, about in _STAGES
}


def stage_class(name: str) -> type[Any]:
    """Import a stage's class. Raises NapkinError, with the nearest name, for one that does not exist."""
    if name not in STAGES:
        raise NapkinError(f"there is no stage '{name}': {suggestion(name, STAGES)}")
    module, _, cls = STAGES[name].where.partition(":")
    return getattr(importlib.import_module(module), cls)


def make_stage(name: str, options: Mapping[str, Any]) -> Stage:
    """A stage with these options, TOML values.

    Raises NapkinError for an unknown stage or option, a missing option, and a value of the wrong type or range.
    """
    cls = stage_class(name)
    known = [field.name for field in dataclasses.fields(cls)]
    for option in options:
        if option not in known:
            way_out = suggestion(option, known) if known else "it has none"
            raise NapkinError(f"stage '{name}' has no option '{option}': {way_out}")
    try:
        return msgspec.convert(dict(options), cls)
    except msgspec.ValidationError as error:
        how = str(error).replace("`$.", "`").replace("Object missing", "it is missing the")
        raise NapkinError(f"stage '{name}': {how}: `napkin data {name} --help` lists its options") from None
    except NapkinError as error:
        raise NapkinError(f"stage '{name}': {error}") from None


def stage_options(stage: Stage) -> dict[str, Any]:
    """All options of a stage with their values, as JSON has them."""
    fields = dataclasses.fields(typing.cast(Any, stage))
    return {field.name: msgspec.to_builtins(getattr(stage, field.name)) for field in fields}


def stage_version(stage: Stage) -> int:
    """The version of what a stage does, its class variable `version`: 1 unless it has one."""
    return getattr(type(stage), "version", 1)


@dataclass(frozen=True)
class Pass:
    """The part of a pipeline that is done to each shard alone, in one process."""

    number: int
    decided: CorpusStage | None
    """The stage whose decisions are applied first."""
    stages: tuple[RecordStage, ...]
    """The stages that follow."""
    summarized: CorpusStage | None
    """The stage that comes next, for which the shard is summarized and kept; None in the last pass."""
    first_stage: int
    """The number of its first stage in the pipeline, from 0."""

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """All stages that may drop records, in order."""
        return self.stages if self.decided is None else (self.decided, *self.stages)


def divide_into_passes(stages: Sequence[Stage]) -> list[Pass]:
    """The passes of a pipeline's stages; there is at least one."""
    passes: list[Pass] = []
    decided: CorpusStage | None = None
    run: list[RecordStage] = []
    first = 0
    for number, stage in enumerate(stages):
        if isinstance(stage, CorpusStage):
            passes.append(Pass(len(passes), decided, tuple(run), stage, first))
            decided, run, first = stage, [], number
        else:
            run.append(stage)
    return [*passes, Pass(len(passes), decided, tuple(run), None, first)]


MEMORY_BYTES = 2**30
"""Memory that a stage which has to see all shards may hold, unless the user says otherwise."""

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
        records = _remaining(records, stage, on_drop, memory)
    return iter(records)


def _remaining(records: Iterable[Record], stage: Stage, on_drop: OnDrop | None, memory: int) -> Iterator[Record]:
    for record, entries, result in _results(records, stage, memory):
        if not isinstance(result, Dropped):
            add_to_trace(result, stage.name, entries)
            yield result
        elif on_drop is not None:
            on_drop(record, stage.name, result)


def _results(records: Iterable[Record], stage: Stage, memory: int) -> Iterator[tuple[Record, int, Record | Dropped]]:
    """Each record, the number of entries that its trace had before the stage, and the stage's result."""
    if not isinstance(stage, CorpusStage):
        for record in records:
            entries = len(record.trace)
            yield record, entries, stage.apply(record)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept, summary, decisions, scratch = (folder / each for each in ("records", "summary", "decisions", "scratch"))
        scratch.mkdir()
        summarize_shard(records, stage, kept, summary)
        stage.decide([summary], [decisions], scratch, memory)
        yield from apply_decisions(stage, read_record_file(kept), decisions)


def add_to_trace(record: Record, stage: str, entries_before: int) -> None:
    """Say in a record's trace that it went through a stage, if the stage itself has not said so."""
    if len(record.trace) == entries_before:
        record.trace.append(TraceEntry(stage))


def apply_decisions(
    stage: CorpusStage, records: Iterable[Record], decisions: Path
) -> Iterator[tuple[Record, int, Record | Dropped]]:
    """Each record of a shard, the entries that its trace had before the stage, and what was decided of it."""
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
    with record_writer(kept) as write:

        def kept_records() -> Iterator[Record]:
            for record in records:
                write(record)
                yield record

        passing = kept_records()
        stage.summarize(passing, summary)
        # A stage need not consume all records.
        for _ in passing:
            pass
