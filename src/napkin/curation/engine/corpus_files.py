"""The files of a corpus.

documents/00012-000.jsonl.zst ...   the documents of a shard; a new file begins after so many bytes of text
dropped/00012.jsonl.zst             a line per document that a stage dropped, with the rule
set_aside.jsonl                     what could not be read or processed, and why
samples.jsonl                       documents for people to read, of each rule and of those that remain
inputs.jsonl                        the files of the input, and the shard that each is in
meter.json                          seconds within each stage: the only file that differs between two runs
manifest.json                       what was done and what came out, with checksums; written last
.work/                              shards that are done, while the pipeline is not
"""

import contextlib
import gzip
import shutil
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

import msgspec

import napkin
from napkin.curation.engine.pipeline_file import OutputFormat, Pipeline, files_of_options, values_of
from napkin.curation.reading.bounded_stream import SetAside
from napkin.curation.reading.input_file import InputFile
from napkin.curation.registry import divide_into_passes, stage_version
from napkin.curation.stage import Record
from napkin.data.file_sections import SEPARATOR_LINE
from napkin.errors import NapkinError, import_extra, zstandard
from napkin.files import atomic_file, atomic_write_bytes, sync_folder
from napkin.json_files import read_json, write_json

WORK, DOCUMENTS, DROPPED_FOLDER = ".work", "documents", "dropped"
INPUTS, SAMPLES, SET_ASIDE, METER = "inputs.jsonl", "samples.jsonl", "set_aside.jsonl", "meter.json"
DROPPED, COUNTS = "dropped.jsonl.zst", "counts.json"
"""Files that a pass leaves of each shard, beside its samples and what it set aside."""
NAME = "manifest.json"
KIND = "napkin corpus"
SCHEMA_VERSION = 1


@dataclass
class Amount:
    """Documents, and their bytes: the UTF-8 of the text, and content of which no text was made yet."""

    documents: int = 0
    bytes: int = 0

    def add(self, n_bytes: int) -> None:
        """Count one more document."""
        self.documents += 1
        self.bytes += n_bytes

    def __iadd__(self, other: "Amount") -> "Amount":
        self.documents += other.documents
        self.bytes += other.bytes
        return self


@dataclass
class StageBooks:
    """The accounts of a stage: what entered, what it dropped by which rule, and what remained."""

    name: str
    version: int = 1
    entered: Amount = field(default_factory=Amount)
    dropped: dict[str, Amount] = field(default_factory=dict)
    remained: Amount = field(default_factory=Amount)

    def __iadd__(self, other: "StageBooks") -> "StageBooks":
        self.entered += other.entered
        self.remained += other.remained
        for rule, amount in other.dropped.items():
            self.dropped[rule] = self.dropped.get(rule, Amount())
            self.dropped[rule] += amount
        return self


@dataclass(frozen=True)
class CorpusFile:
    """A file with documents."""

    name: str
    sha256: str
    file_bytes: int
    documents: int
    text_bytes: int


@dataclass
class Counts:
    """The figures of one shard in one pass."""

    stages: list[StageBooks] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Seconds within each stage."""
    read: Amount = field(default_factory=Amount)
    set_aside: dict[str, int] = field(default_factory=dict)
    files: list[CorpusFile] = field(default_factory=list)


@dataclass(frozen=True)
class InputBooks:
    """The files that were read, listed in inputs.jsonl."""

    files: int
    bytes: int
    read: Amount
    """Documents that entered the first stage, and their bytes."""


@dataclass(frozen=True)
class Manifest:
    """manifest.json: a corpus, its files, and how it was made."""

    kind: str
    schema_version: int
    napkin: str
    """The version that wrote it."""
    pipeline: dict[str, Any]
    """Every option, as `pipeline_file.values_of` gives it."""
    input: InputBooks
    stages: tuple[StageBooks, ...]
    set_aside: dict[str, int]
    """Counts by reason of what could not be read or processed; set_aside.jsonl lists them."""
    documents: int
    text_bytes: int
    files: tuple[CorpusFile, ...]
    files_of_options: dict[str, str]
    """SHA-256 of each file that an option of a stage names, by path."""
    checksums: dict[str, str]
    """SHA-256 of each other file but meter.json, by its path in the corpus."""


def read_manifest(corpus: Path) -> Manifest:
    """The manifest of a finished corpus. Raises NapkinError where there is none, or it cannot be read."""
    manifest = read_json(corpus / NAME, Manifest)
    if manifest is None or manifest.kind != KIND:
        unfinished = (corpus / ".work").is_dir()
        way_out = "run its `napkin data` command again, which finishes it" if unfinished else "name a corpus"
        raise NapkinError(f"'{corpus}' is not a {'finished ' * unfinished}corpus of `napkin data`: {way_out}")
    if manifest.schema_version != SCHEMA_VERSION:
        raise NapkinError(
            f"'{corpus}' has version {manifest.schema_version} of a corpus's manifest, this napkin reads "
            f"{SCHEMA_VERSION}: use another napkin"
        )
    return manifest


_LEVEL = 6
_ROW_GROUP_ROWS = 1000
_ROW_GROUP_BYTES = 2**24


class CorpusWriter:
    """Writes the documents of one shard to `folder`, as files SHARD-000.jsonl.zst, SHARD-001.jsonl.zst ..."""

    def __init__(self, folder: Path, shard: int, output_format: OutputFormat, shard_bytes: int) -> None:
        self._folder, self._shard, self._format, self._most = folder, shard, output_format, shard_bytes
        self._file: Any = None
        self._path = folder
        self._documents = self._bytes = 0
        self.files: list[CorpusFile] = []

    def write(self, record: Record, text: bytes) -> None:
        """Append a document, whose text is `text` as UTF-8."""
        if self._file is None:
            begin, name = _OPENERS[self._format], f"{self._shard:05d}-{len(self.files):03d}"
            self._path = self._folder / f"{name}.{'txt' if self._format == 'text' else self._format}"
            self._file = begin(self._path)
        self._file.write(record, text)
        self._documents += 1
        self._bytes += len(text)
        if self._bytes >= self._most:
            self.close()

    def close(self) -> None:
        """Finish the last file."""
        if self._file is None:
            return
        self._file.close()
        with open(self._path, "rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        n_bytes = self._path.stat().st_size
        self.files.append(CorpusFile(self._path.name, digest, n_bytes, self._documents, self._bytes))
        self._file, self._documents, self._bytes = None, 0, 0


def record_values(record: Record) -> dict[str, Any]:
    """A document as a line of JSON has it."""
    return {
        "identity": record.identity,
        "text": record.text,
        "source": record.source,
        "offset": record.offset,
        "address": record.address,
        "licence": record.licence,
        "fields": record.fields,
        "trace": [{"stage": entry.stage, "note": entry.note} for entry in record.trace],
    }


class _LineFile:
    """JSON lines, compressed by `compressed`; or texts with separator lines between."""

    def __init__(self, path: Path, compressed: Callable[[Any], Any], *, only_text: bool = False) -> None:
        self._stack = contextlib.ExitStack()
        stack = self._stack
        self._stream = stack.enter_context(compressed(stack.enter_context(open(path, "xb"))))  # noqa: SIM115
        self._only_text, self._is_empty = only_text, True

    def write(self, record: Record, text: bytes) -> None:
        if not self._only_text:
            self._stream.write(msgspec.json.encode(record_values(record)) + b"\n")
            return
        if not self._is_empty:
            self._stream.write(SEPARATOR_LINE + b"\n")
        self._stream.write(text if text.endswith(b"\n") else text + b"\n")
        self._is_empty = False

    def close(self) -> None:
        self._stack.close()


class _ParquetFile:
    """A row per document; `fields` is JSON."""

    def __init__(self, path: Path) -> None:
        arrow, parquet = import_extra("pyarrow", "a Parquet file"), import_extra("pyarrow.parquet", "a Parquet file")
        text = arrow.large_string()
        entry = arrow.struct([("stage", arrow.string()), ("note", arrow.string())])
        columns = [(name, text) for name in ("identity", "text", "source")]
        columns += [("offset", arrow.int64()), ("address", text), ("licence", text), ("fields", text)]
        self._schema = arrow.schema([*columns, ("trace", arrow.list_(entry))])
        self._file = open(path, "xb")  # noqa: SIM115
        self._writer = parquet.ParquetWriter(self._file, self._schema, compression="zstd")
        self._batch = arrow.RecordBatch.from_pylist
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def write(self, record: Record, text: bytes) -> None:
        self._rows.append(record_values(record) | {"fields": msgspec.json.encode(record.fields).decode()})
        self._bytes += len(text)
        if len(self._rows) >= _ROW_GROUP_ROWS or self._bytes >= _ROW_GROUP_BYTES:
            self._write_rows()

    def _write_rows(self) -> None:
        if self._rows:
            self._writer.write_batch(self._batch(self._rows, schema=self._schema))
        self._rows, self._bytes = [], 0

    def close(self) -> None:
        self._write_rows()
        self._writer.close()
        self._file.close()


def _as_gzip(file: Any) -> Any:
    # Without a name and a time, so that the same documents give the same bytes.
    return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=_LEVEL)


def as_zstd(file: Any) -> Any:
    """A stream that writes zstd to a file and, when it is closed, ends it."""
    return zstandard().ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False)


_OPENERS: dict[str, Callable[[Path], Any]] = {
    "jsonl.zst": lambda path: _LineFile(path, as_zstd),
    "jsonl.gz": lambda path: _LineFile(path, _as_gzip),
    "jsonl": lambda path: _LineFile(path, contextlib.nullcontext),
    "parquet": _ParquetFile,
    "text": lambda path: _LineFile(path, contextlib.nullcontext, only_text=True),
}


LONGEST_TEXT = 4000
"""Characters kept of a sample; of a longer text, its beginning."""
_MOST_RULES = 1000
"""The most rules per shard and stage that are counted separately, for stages whose rules are not a small set."""


@dataclass(frozen=True, order=True)
class Sample:
    """A document that was dropped, or that remained: then `stage` is -1 and `rule` is empty."""

    stage: int
    """The stage's number in the pipeline, from 0."""
    rule: str
    rank: str
    """The hash by which the sample was chosen."""
    identity: str
    detail: str
    address: str
    characters: int
    text: str


class Samples:
    """The lowest `most` of each rule."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of_rule: dict[tuple[int, str], list[Sample]] = {}

    def offer(self, record: Record, stage: int = -1, rule: str = "", detail: str = "") -> None:
        """Keep a document if it is among the lowest."""
        rank = blake2b(record.identity.encode(errors="replace"), digest_size=8).hexdigest()
        if self._is_wanted(stage, rule, rank):
            text = record.text or record.content[:LONGEST_TEXT].decode(errors="replace")
            shown = text[:LONGEST_TEXT].encode(errors="replace").decode()
            characters = len(record.text or record.content)
            self.add(Sample(stage, rule, rank, record.identity, detail, record.address, characters, shown))

    def add(self, sample: Sample) -> None:
        """Keep a sample if it is among the lowest of its rule."""
        if not self._is_wanted(sample.stage, sample.rule, sample.rank):
            return
        of_rule = self._of_rule.setdefault((sample.stage, sample.rule), [])
        insort(of_rule, sample)
        del of_rule[self._most :]

    def _is_wanted(self, stage: int, rule: str, rank: str) -> bool:
        of_rule = self._of_rule.get((stage, rule))
        if of_rule is None:
            return self._most > 0 and len(self._of_rule) < _MOST_RULES
        return len(of_rule) < self._most or rank < of_rule[-1].rank

    def sorted(self) -> Iterable[Sample]:
        """All samples, by stage, rule and hash."""
        return sorted(each for of_rule in self._of_rule.values() for each in of_rule)


def write_inputs(path: Path, shards: Sequence[Sequence[InputFile]]) -> None:
    """List the files of the input, or parts of them, with the shard that each is in."""
    with atomic_file(path, overwrite=True) as file:
        for number, shard in enumerate(shards):
            for each in shard:
                line = {"shard": number} | msgspec.to_builtins(each)
                if each.start is None:
                    del line["start"], line["number"]
                file.write(msgspec.json.encode(line) + b"\n")


def read_inputs(path: Path) -> Iterator[tuple[int, InputFile]]:
    """The files that inputs.jsonl lists, each with its shard."""
    with open(path, "rb") as lines:
        for line in lines:
            values = msgspec.json.decode(line)
            yield values.pop("shard"), InputFile(**values)


def finish_corpus(
    out: Path,
    pipeline: Pipeline,
    shards: Sequence[Sequence[InputFile]],
    found: Sequence[SetAside],
    folders: Sequence[Sequence[Path]],
) -> Manifest:
    """Assemble the corpus once all shards are done, and remove the intermediate files. `found` lists what was set aside
    while searching for input files; `folders` has the results of each pass for each shard. Each step can be repeated
    after a kill.
    """
    counts = [
        [msgspec.json.decode((folder / COUNTS).read_bytes(), type=Counts) for folder in of_shard]
        for of_shard in folders
    ]
    all_folders = [folder for of_shard in folders for folder in of_shard]
    _move_documents(out, folders, counts)
    first_lines = b"".join(msgspec.json.encode(each) + b"\n" for each in found)
    _join_files([folder / SET_ASIDE for folder in all_folders], out / SET_ASIDE, first_lines)
    _join_samples([folder / SAMPLES for folder in all_folders], out / SAMPLES, pipeline.output.samples)
    write_inputs(out / INPUTS, shards)

    stages, seconds = _books_of_stages(pipeline, counts)
    atomic_write_bytes(out / METER, msgspec.json.encode({"stage_seconds": seconds}) + b"\n", overwrite=True)
    files = tuple(file for counted in counts for file in counted[-1].files)
    read, reasons = Amount(), Counter(each.reason for each in found)
    for counted in counts:
        read += counted[0].read
        for each in counted:
            reasons.update(each.set_aside)
    manifest = Manifest(
        kind=KIND,
        schema_version=SCHEMA_VERSION,
        napkin=napkin.__version__,
        pipeline=values_of(pipeline),
        input=InputBooks(
            sum(not file.start for shard in shards for file in shard),
            sum(file.bytes for shard in shards for file in shard),
            read,
        ),
        stages=tuple(stages),
        set_aside=dict(sorted(reasons.items())),
        documents=sum(file.documents for file in files),
        text_bytes=sum(file.text_bytes for file in files),
        files=files,
        files_of_options=files_of_options(pipeline),
        checksums=_checksums(out),
    )
    write_json(out / NAME, manifest)
    shutil.rmtree(out / WORK, ignore_errors=True)
    return manifest


def _move_documents(out: Path, folders: Sequence[Sequence[Path]], counts: Sequence[Sequence[Counts]]) -> None:
    """Move the documents of the last pass to the corpus, and join the dropped ones of all passes by shard."""
    for name in (DOCUMENTS, DROPPED_FOLDER):
        (out / name).mkdir(exist_ok=True)
    for shard, (of_shard, counted) in enumerate(zip(folders, counts, strict=True)):
        for file in counted[-1].files:
            # Moved before the command was killed.
            with suppress(FileNotFoundError):
                (of_shard[-1] / file.name).rename(out / DOCUMENTS / file.name)
        if any(books.dropped for each in counted for books in each.stages):
            # Concatenated zstd frames are a valid zstd file.
            _join_files([folder / DROPPED for folder in of_shard], out / DROPPED_FOLDER / f"{shard:05d}.jsonl.zst")
    sync_folder(out / DOCUMENTS)
    sync_folder(out / DROPPED_FOLDER)


def _join_samples(paths: Sequence[Path], target: Path, most: int) -> None:
    samples = Samples(most)
    for path in paths:
        with open(path, "rb") as lines:
            for line in lines:
                samples.add(msgspec.json.decode(line, type=Sample))
    with atomic_file(target, overwrite=True) as file:
        file.writelines(msgspec.json.encode(sample) + b"\n" for sample in samples.sorted())


def _books_of_stages(pipeline: Pipeline, counts: Sequence[Sequence[Counts]]) -> tuple[list[StageBooks], list[float]]:
    """What each stage read, kept and dropped in all shards, and its seconds."""
    passes = divide_into_passes(pipeline.stages)
    stages = [StageBooks(stage.name, stage_version(stage)) for stage in pipeline.stages]
    seconds = [0.0] * len(stages)
    for counted in counts:
        for pass_, each in zip(passes, counted, strict=True):
            for number, (books, spent) in enumerate(zip(each.stages, each.seconds, strict=True), pass_.first_stage):
                stages[number] += books
                seconds[number] += spent
    for books in stages:
        books.dropped = dict(sorted(books.dropped.items()))
    return stages, seconds


def _checksums(out: Path) -> dict[str, str]:
    """SHA-256, in hexadecimal, of the corpus' files besides its documents, by their paths in it."""
    checksums: dict[str, str] = {}
    for path in (out / SET_ASIDE, out / SAMPLES, out / INPUTS, *sorted((out / DROPPED_FOLDER).iterdir())):
        with open(path, "rb") as file:
            checksums[path.relative_to(out).as_posix()] = file_digest(file, "sha256").hexdigest()
    return checksums


def _join_files(paths: Sequence[Path], target: Path, beginning: bytes = b"") -> None:
    with atomic_file(target, overwrite=True) as file:
        file.write(beginning)
        for path in paths:
            with open(path, "rb") as part:
                shutil.copyfileobj(part, file)
