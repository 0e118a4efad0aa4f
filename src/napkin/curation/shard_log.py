"""What happens to the records of one shard in one pass: counts, traces, lines of what was dropped, samples."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from napkin.curation.applying import add_to_trace, apply_decisions
from napkin.curation.corpus_writer import as_zstd
from napkin.curation.manifest import Amount, CorpusFile, StageBooks
from napkin.curation.passes import Pass
from napkin.curation.reading.set_aside import SetAside
from napkin.curation.record import Record
from napkin.curation.registry import stage_version
from napkin.curation.samples import Samples
from napkin.curation.stage import CorpusStage, Dropped, RecordStage
from napkin.errors import NapkinError, first_line

DROPPED, SET_ASIDE, SAMPLES, COUNTS = "dropped.jsonl.zst", "set_aside.jsonl", "samples.jsonl", "counts.json"
"""The files that a pass leaves of each shard."""


@dataclass
class Counts:
    """The figures of one shard in one pass."""

    stages: list[StageBooks] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Within each stage."""
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
