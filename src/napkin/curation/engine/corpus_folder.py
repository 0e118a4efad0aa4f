"""The folder of a corpus: what is in it, and how it is finished when all shards are done.

    documents/00012-000.jsonl.zst ...   the documents of a shard
    dropped/00012.jsonl.zst             a line per document that a stage dropped, with the rule
    set_aside.jsonl                     what could not be read or processed, and why
    samples.jsonl                       documents for people to read, of each rule and of those that remain
    inputs.jsonl                        the files of the input, and the shard that each is in
    meter.json                          seconds within each stage: the only file that differs between two runs
    manifest.json                       what was done and what came out, with checksums; written last
    .work/                              shards that are done, while the pipeline is not

Each step of finishing may be done again after a kill.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import file_digest
from pathlib import Path

import msgspec

import napkin
from napkin.curation.engine.corpus_writer import KIND, NAME, SCHEMA_VERSION, Amount, InputBooks, Manifest, StageBooks
from napkin.curation.engine.pipeline_file import Pipeline, files_of_options, values_of
from napkin.curation.engine.samples import Sample, Samples
from napkin.curation.engine.shard_work import COUNTS, DROPPED, SAMPLES, SET_ASIDE, Counts, ShardTask, folder_of
from napkin.curation.reading.bounded_stream import SetAside
from napkin.curation.reading.input_file import InputFile
from napkin.curation.registry import Pass, divide_into_passes, stage_version
from napkin.files import atomic_file, atomic_write_bytes, sync_folder
from napkin.json_files import write_json

WORK = ".work"
DOCUMENTS = "documents"
DROPPED_FOLDER = "dropped"
INPUTS = "inputs.jsonl"
METER = "meter.json"


def finish_corpus(
    out: Path, pipeline: Pipeline, shards: Sequence[Sequence[InputFile]], found: Sequence[SetAside]
) -> Manifest:
    """Make the corpus of shards that are all done, and remove what was kept of the work.

    `found` is what was set aside when the files of the input were looked for.
    """
    work = out / WORK
    passes = divide_into_passes(pipeline.stages)
    tasks = [[ShardTask(pass_.number, shard) for pass_ in passes] for shard in range(len(shards))]
    folders = [[folder_of(work, task) for task in of_shard] for of_shard in tasks]
    counts = [[_read_counts(folder) for folder in of_shard] for of_shard in folders]
    for name in (DOCUMENTS, DROPPED_FOLDER):
        (out / name).mkdir(exist_ok=True)
    for shard, of_shard in enumerate(folders):
        for file in counts[shard][-1].files:
            # Moved before the command was killed.
            with suppress(FileNotFoundError):
                (of_shard[-1] / file.name).rename(out / DOCUMENTS / file.name)
        if any(books.dropped for each in counts[shard] for books in each.stages):
            # Frames of zstd one behind the other are a file of zstd.
            _concatenate([folder / DROPPED for folder in of_shard], out / DROPPED_FOLDER / f"{shard:05d}.jsonl.zst")
    sync_folder(out / DOCUMENTS)
    sync_folder(out / DROPPED_FOLDER)
    _write_set_aside(out / SET_ASIDE, found, [folder / SET_ASIDE for of_shard in folders for folder in of_shard])
    _write_samples(out / SAMPLES, pipeline, [folder / SAMPLES for of_shard in folders for folder in of_shard])
    write_inputs(out / INPUTS, shards)
    stages, seconds = _books(pipeline, passes, counts)
    atomic_write_bytes(out / METER, msgspec.json.encode({"stage_seconds": seconds}) + b"\n", overwrite=True)
    manifest = _manifest(out, pipeline, shards, found, stages, counts)
    write_json(out / NAME, manifest)
    remove_work(out)
    return manifest


def remove_work(out: Path) -> None:
    """Remove what was kept of the work of a finished corpus."""
    shutil.rmtree(out / WORK, ignore_errors=True)


def write_inputs(path: Path, shards: Sequence[Sequence[InputFile]]) -> None:
    """List the files of the input, with the shard that each is in."""
    with atomic_file(path, overwrite=True) as file:
        for line in input_lines(shards):
            file.write(line)


def input_lines(shards: Sequence[Sequence[InputFile]]) -> Iterator[bytes]:
    for number, shard in enumerate(shards):
        for each in shard:
            yield msgspec.json.encode({"shard": number} | msgspec.to_builtins(each)) + b"\n"


def _read_counts(folder: Path) -> Counts:
    return msgspec.json.decode((folder / COUNTS).read_bytes(), type=Counts)


def _concatenate(paths: Iterable[Path], target: Path) -> None:
    with atomic_file(target, overwrite=True) as file:
        for path in paths:
            with open(path, "rb") as part:
                shutil.copyfileobj(part, file)


def _write_set_aside(path: Path, found: Sequence[SetAside], parts: Sequence[Path]) -> None:
    with atomic_file(path, overwrite=True) as file:
        for each in found:
            file.write(msgspec.json.encode(each) + b"\n")
        for part in parts:
            with open(part, "rb") as lines:
                shutil.copyfileobj(lines, file)


def _write_samples(path: Path, pipeline: Pipeline, parts: Sequence[Path]) -> None:
    samples = Samples(pipeline.output.samples)
    for part in parts:
        with open(part, "rb") as lines:
            for line in lines:
                samples.add(msgspec.json.decode(line, type=Sample))
    with atomic_file(path, overwrite=True) as file:
        for sample in samples.sorted():
            file.write(msgspec.json.encode(sample) + b"\n")


def _books(
    pipeline: Pipeline, passes: Sequence[Pass], counts: Sequence[Sequence[Counts]]
) -> tuple[list[StageBooks], list[float]]:
    """The books and the seconds of each stage, over all shards."""
    books = [StageBooks(stage.name, stage_version(stage)) for stage in pipeline.stages]
    seconds = [0.0] * len(books)
    for of_shard in counts:
        for pass_, of_pass in zip(passes, of_shard, strict=True):
            for number, each in enumerate(of_pass.stages, start=pass_.first_stage):
                books[number] += each
            for number, each in enumerate(of_pass.seconds, start=pass_.first_stage):
                seconds[number] += each
    return [replace(each, dropped=dict(sorted(each.dropped.items()))) for each in books], seconds


def _manifest(
    out: Path,
    pipeline: Pipeline,
    shards: Sequence[Sequence[InputFile]],
    found: Sequence[SetAside],
    stages: Sequence[StageBooks],
    counts: Sequence[Sequence[Counts]],
) -> Manifest:
    read, reasons = Amount(), dict[str, int]()
    for of_shard in counts:
        read += of_shard[0].read
        for each in of_shard:
            for reason, n in each.set_aside.items():
                reasons[reason] = reasons.get(reason, 0) + n
    for each in found:
        reasons[each.reason] = reasons.get(each.reason, 0) + 1
    files = tuple(file for of_shard in counts for file in of_shard[-1].files)
    inputs = [file for shard in shards for file in shard]
    beside = [out / SET_ASIDE, out / SAMPLES, out / INPUTS, *sorted((out / DROPPED_FOLDER).iterdir())]
    return Manifest(
        kind=KIND,
        schema_version=SCHEMA_VERSION,
        napkin=napkin.__version__,
        pipeline=values_of(pipeline),
        input=InputBooks(len(inputs), sum(file.bytes for file in inputs), read),
        stages=tuple(stages),
        set_aside=dict(sorted(reasons.items())),
        documents=sum(file.documents for file in files),
        text_bytes=sum(file.text_bytes for file in files),
        files=files,
        files_of_options=files_of_options(pipeline),
        checksums={path.relative_to(out).as_posix(): _digest(path) for path in beside},
    )


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()
