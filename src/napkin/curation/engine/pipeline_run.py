"""Running a pipeline: files into shards, shards through passes, and a corpus at the end; after a kill it goes on.

The bytes of the corpus depend on the pipeline and its files alone: how files are divided into shards does not depend on
the number of workers, and each task leaves the same bytes whoever does it, and however often.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import msgspec

from napkin.curation.engine.corpus_files import (
    INPUTS,
    NAME,
    WORK,
    Manifest,
    finish_corpus,
    read_inputs,
    read_manifest,
    write_inputs,
)
from napkin.curation.engine.pipeline_file import Pipeline, files_of_options, read_pipeline, values_of
from napkin.curation.engine.shard_work import RECORDS, SUMMARY, DecisionTask, ShardTask, Task, folder_of
from napkin.curation.engine.workers import do_tasks, do_tasks_on_ray, ray_cluster
from napkin.curation.reading.bounded_stream import SetAside
from napkin.curation.reading.documents import divide_file
from napkin.curation.reading.input_file import InputFile, find_files
from napkin.curation.registry import divide_into_passes, stage_version
from napkin.errors import NapkinError, import_extra, zstandard
from napkin.files import StrPath, try_lock
from napkin.json_files import read_json, write_json
from napkin.units import format_bytes

STATE = "pipeline.json"

Engine = Literal["processes", "ray"]
Progress = Callable[[int, int, str], None]
"""Called with bytes of input that are done, those of all passes, and what is done now."""


@dataclass(frozen=True)
class _State:
    """The parts that an unfinished corpus is made of."""

    pipeline: dict[str, Any]
    versions: list[int] = field(default_factory=list)
    files_of_options: dict[str, str] = field(default_factory=dict)
    """Their SHA-256, by path."""


@dataclass(frozen=True)
class Outcome:
    """A finished corpus, and whether it had been finished before."""

    manifest: Manifest
    was_finished: bool

    def __str__(self) -> str:
        manifest, read = self.manifest, self.manifest.input.read
        lines = [f"{manifest.documents:,} of {read.documents:,} documents, {format_bytes(manifest.text_bytes)} of text"]
        for stage in manifest.stages:
            lines += [f"{stage.name} drops {each.documents:,}: {rule}" for rule, each in sorted(stage.dropped.items())]
        lines += [f"set aside {n:,}: {reason}" for reason, n in manifest.set_aside.items()]
        return "\n".join(lines)


def curate(
    pipeline: Pipeline | StrPath,
    out: StrPath,
    *,
    workers: int = 1,
    engine: Engine = "processes",
    ray_address: str | None = None,
    on_progress: Progress = lambda *_: None,
    on_message: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Make the corpus `out` of a pipeline, or of its TOML file; what was begun there, by this pipeline, is continued.

    `out` does not exist, is empty, or is a folder in which this pipeline was begun. `workers` processes of this machine
    work on shards, or all nodes of a Ray cluster: the one at `ray_address`; None starts one here. `on_message` is
    called with a line for the user, where a worker ended; see also `Progress`.

    Raises NapkinError where `out` is something else, was begun with other options or files, or is being written by
    another process; where an input does not exist, a library is missing, or the disk is full.
    """
    if workers < 1:
        raise NapkinError(f"--workers is {workers}: use 1 or more")
    out = Path(out)
    if not isinstance(pipeline, Pipeline):
        pipeline = read_pipeline(pipeline)
    zstandard()
    if pipeline.output.format == "parquet":
        import_extra("pyarrow", "a Parquet file")
    files, found = _find_files(pipeline)
    if _refuse_other(out, pipeline, files):
        shutil.rmtree(out / WORK, ignore_errors=True)
        return Outcome(read_manifest(out), True)
    with ExitStack() as stack:
        stack.enter_context(_locked(out))
        work = out / WORK
        if engine == "processes":
            do = partial(do_tasks, pipeline, work, workers, on_message)
        else:
            do = partial(do_tasks_on_ray, stack.enter_context(ray_cluster(ray_address)), pipeline, work)
        if (work / STATE).exists():
            shards = _divided_before(work / INPUTS)
        else:
            work.mkdir(exist_ok=True)
            shards = _divide_into_shards(pipeline, files, on_progress)
            write_inputs(work / INPUTS, shards)
            write_json(work / STATE, _state_of(pipeline))
        _do_passes(pipeline, work, shards, do, on_progress)
        on_progress(0, 0, "writing the manifest")
        passes = divide_into_passes(pipeline.stages)
        folders = [[folder_of(work, ShardTask(each.number, n)) for each in passes] for n in range(len(shards))]
        return Outcome(finish_corpus(out, pipeline, shards, found, folders), False)


def _find_files(pipeline: Pipeline) -> tuple[list[InputFile], list[SetAside]]:
    """The files of the input in their order, and what was set aside."""
    files: list[InputFile] = []
    found: list[SetAside] = []
    for each in find_files(pipeline.input.paths, pipeline.input.format):
        if isinstance(each, SetAside):
            found.append(each)
        else:
            files.append(each)
    if not files:
        places = ", ".join(f"'{path}'" for path in pipeline.input.paths)
        raise NapkinError(f"no files are found in {places}: name files, folders, patterns or addresses")
    return files, found


def _divide_into_shards(pipeline: Pipeline, files: Sequence[InputFile], on_progress: Progress) -> list[list[InputFile]]:
    """Divide files, and parts of large ones, in their order into shards of `shard_bytes` together."""
    options = pipeline.input
    shards: list[list[InputFile]] = []
    size = 0
    for file in files:
        if file.bytes > options.shard_bytes:
            on_progress(0, 0, f"dividing '{file.name}'")
        for part in divide_file(file, options.limits, options.shard_bytes):
            if not shards or size + part.bytes > options.shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(part)
            # A small file costs as much as some kilobytes.
            size += max(part.bytes, 4096)
    return shards


def _divided_before(inputs: Path) -> list[list[InputFile]]:
    shards: list[list[InputFile]] = []
    for number, file in read_inputs(inputs):
        if number == len(shards):
            shards.append([])
        shards[number].append(file)
    return shards


def _refuse_other(out: Path, pipeline: Pipeline, files: Sequence[InputFile]) -> bool:
    """Return True if `out` is finished. Raises NapkinError where it is not of this pipeline and these files."""
    if not os.path.lexists(out):
        return False
    if not out.is_dir():
        raise NapkinError(f"'{out}' exists and is not a folder: choose another --out")
    finished = (out / NAME).exists()
    if finished:
        manifest = read_manifest(out)
        versions = [each.version for each in manifest.stages]
        before = _State(manifest.pipeline, versions, manifest.files_of_options)
    else:
        before = read_json(out / WORK / STATE, _State)
        if before is None:
            if set(os.listdir(out)) - {WORK}:
                raise NapkinError(f"'{out}' exists and is not a corpus: choose another --out")
            return False
    now = _state_of(pipeline)
    change = _difference(before.pipeline, msgspec.json.decode(msgspec.json.encode(now.pipeline)))
    if change is None and before.versions != now.versions:
        change = f"the versions of its stages were {before.versions}, they are {now.versions} now"
    if change is None and before.files_of_options != now.files_of_options:
        both = before.files_of_options.items() ^ now.files_of_options.items()
        change = f"'{min(path for path, _ in both)}', which a stage reads, has changed since"
    change = change or _changed_input((out if finished else out / WORK) / INPUTS, files)
    if change is not None:
        raise NapkinError(f"'{out}' was {'made' if finished else 'begun'} otherwise: {change}: choose another --out")
    return finished


def _difference(before: Any, now: Any, place: str = "") -> str | None:
    """The first value that differs, with its place."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*before, *now]):
            difference = _difference(before.get(name), now.get(name), f"{place}.{name}" if place else name)
            if difference is not None:
                return difference
        return None
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True), start=1)
        return next((difference for n, pair in pairs if (difference := _difference(*pair, f"{place} {n}"))), None)
    return None if before == now else f"{place} was {_shown(before)}, it is {_shown(now)} now"


def _shown(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return ", ".join(str(each.get("name")) for each in value) or "empty"
    return msgspec.json.encode(value).decode()[:200]


def _changed_input(path: Path, files: Sequence[InputFile]) -> str | None:
    """The first file of the input that is not as it was."""
    if not path.exists():
        return None
    now = iter(files)
    for name, parts in groupby((file for _, file in read_inputs(path)), key=lambda file: file.name):
        first, *others = parts
        before = replace(first, bytes=first.bytes + sum(each.bytes for each in others), start=None)
        file = next(now, None)
        if file is None:
            return f"input '{name}' is not there any more"
        if file != before:
            what = "has changed since" if name == file.name else f"was there, '{file.name}' is in its place now"
            return f"input '{name}' {what}"
    file = next(now, None)
    return None if file is None else f"input '{file.name}' is new"


def _state_of(pipeline: Pipeline) -> _State:
    versions = [stage_version(stage) for stage in pipeline.stages]
    return _State(values_of(pipeline), versions, files_of_options(pipeline))


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """While the block runs, no other command writes to `out`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise NapkinError(f"the folder '{out}' cannot be made ({error.strerror}): choose another --out") from None
    try:
        if not try_lock(descriptor):
            raise NapkinError(f"'{out}' is being written by another process: wait for its end")
        yield
    except OSError as error:
        reason = f"{error.filename or out}: {error.strerror}"
        raise NapkinError(f"'{out}' cannot be written ({reason}): make room, and run the same command again") from None
    finally:
        os.close(descriptor)


def _do_passes(
    pipeline: Pipeline,
    work: Path,
    shards: Sequence[Sequence[InputFile]],
    do: Callable[[Sequence[Task], Callable[[Task], None]], None],
    on_progress: Progress,
) -> None:
    """Have all tasks done that are not; `do` does tasks in any order, and calls its function after each."""
    passes = divide_into_passes(pipeline.stages)
    sizes = [sum(file.bytes for file in shard) for shard in shards]
    total, done = sum(sizes) * len(passes), 0

    for pass_ in passes:
        title = f"pass {pass_.number + 1} of {len(passes)}"
        (work / f"pass-{pass_.number}").mkdir(exist_ok=True)
        tasks = [
            ShardTask(pass_.number, shard, tuple(files) if pass_.number == 0 else ())
            for shard, files in enumerate(shards)
        ]
        to_do = [task for task in tasks if not folder_of(work, task).is_dir()]
        done += sum(sizes) - sum(sizes[task.shard] for task in to_do)
        on_progress(done, total, title)

        def count(task: Task, title: str = title) -> None:
            nonlocal done
            assert isinstance(task, ShardTask)
            done += sizes[task.shard]
            if task.pass_number:
                # Files that only this task had to read are removed: a corpus may be large.
                before = folder_of(work, ShardTask(task.pass_number - 1, task.shard))
                for name in (RECORDS, SUMMARY):
                    (before / name).unlink(missing_ok=True)
            on_progress(done, total, f"{title}, shard {task.shard + 1:,} of {len(shards):,}")

        do(to_do, count)
        if pass_.summarized is not None:
            decision = DecisionTask(pass_.number, len(shards))
            if not folder_of(work, decision).is_dir():
                on_progress(done, total, f"{pass_.summarized.name}: deciding")
                do([decision], lambda _: None)
