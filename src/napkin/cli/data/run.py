"""`napkin data run`, and `napkin data STAGE`: a pipeline of one stage, whose options are the fields of the stage.

`napkin data why` and `napkin data samples` say what became of documents.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from napkin.cli.commands import Main
from napkin.cli.common.files import folder_for
from napkin.cli.common.options import INLINED, JsonOption, command
from napkin.cli.common.progress import ProgressLine, progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.curation.engine.corpus_writer import Amount, Manifest
from napkin.curation.engine.pipeline_file import InputOptions, OutputFormat, OutputOptions, Pipeline, read_pipeline
from napkin.curation.engine.pipeline_run import Engine, Outcome, curate
from napkin.curation.reading.input_file import InputFormat
from napkin.curation.registry import stage_class
from napkin.errors import NapkinError
from napkin.hardware.host import usable_cores
from napkin.units import format_bytes, format_share


@dataclass(frozen=True)
class RunOptions(JsonOption):
    """Make a corpus by a pipeline: a TOML file with [input], a [[stage]] for each stage and [output]. Killed at any
    moment, the same command goes on where it was, and the corpus is the same to the byte; so it is for any number of
    workers. Each stage is a command too, and `napkin data STAGE --help` lists its options."""

    pipeline: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PIPELINE")]
    """The pipeline, a TOML file."""
    out: str
    """Folder of the corpus."""
    workers: int | None = None
    """Processes that work on shards; None is one per core."""
    engine: Literal["processes", "ray"] = "processes"
    """Who works on shards: processes of this machine, or a Ray cluster whose nodes see the same files at the same
    paths."""
    ray_address: str | None = None
    """Address of the Ray cluster, such as auto or 10.0.0.1:6379; None starts one on this machine."""


@command("data run", RunOptions)
def run_command(options: RunOptions) -> None:
    run_and_print(
        read_pipeline(options.pipeline),
        options.out,
        options.workers,
        engine=options.engine,
        ray_address=options.ray_address,
        as_program=options.json,
    )


@dataclass(frozen=True)
class StageCommand(JsonOption):
    """Options of the commands of all stages."""

    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT ...")] = ()
    """Files, folders, patterns such as 'crawl/*.warc.gz', and addresses that fsspec knows."""
    out: str = ""
    """Folder of the corpus."""
    input_format: InputFormat = "auto"
    """Format of the files; `auto` is told by the end of each name."""
    text_field: str = InputOptions.text_field
    """The field of JSON lines, or column of Parquet, that is the text."""
    output_format: OutputFormat = "jsonl.zst"
    """Format of the documents that are written."""
    workers: int | None = None
    """Processes that work on shards; None is one per core."""
    memory_bytes: int = Pipeline.memory_bytes
    """Bytes that a stage may hold that has to see all shards."""


def options_class(name: str) -> type:
    """The options of a stage's command: its own, and those of all."""
    cls = stage_class(name)
    return dataclasses.make_dataclass(
        f"{cls.__name__}Options",
        [("stage", Annotated[cls, INLINED], _default(cls))],
        bases=(StageCommand,),
        namespace={"__doc__": cls.__doc__},
        frozen=True,
    )


def _default(cls: type[Any]) -> Any:
    if any(each.default is each.default_factory for each in dataclasses.fields(cls)):
        # It has an option that must be given.
        return field(kw_only=True)
    return field(default=cls(), kw_only=True)


def stage_command(name: str) -> Main:
    """The command of a stage."""
    return command(f"data {name}", options_class(name))(_run_stage)


def _run_stage(options: Any) -> None:
    if not options.paths:
        raise NapkinError("no INPUT is given: name files, folders, patterns or addresses")
    if not options.out:
        raise NapkinError("--out is missing: name a folder for the corpus")
    pipeline = Pipeline(
        InputOptions(options.paths, options.input_format, options.text_field),
        (options.stage,),
        OutputOptions(options.output_format),
        options.memory_bytes,
    )
    run_and_print(pipeline, options.out, options.workers, as_program=options.json)


def run_and_print(
    pipeline: Pipeline,
    out: str,
    workers: int | None,
    *,
    engine: Engine = "processes",
    ray_address: str | None = None,
    as_program: bool,
) -> None:
    """Make a corpus, or go on with it, and print what came out."""
    if not out:
        raise NapkinError("--out is empty: name a folder for the corpus")
    path = Path(out)
    with progress_line("reading") as line, folder_for(path):
        outcome = curate(
            pipeline,
            path,
            workers=usable_cores() if workers is None else workers,
            engine=engine,
            ray_address=ray_address,
            on_progress=partial(_show_progress, line),
            on_message=lambda message: notify(f"data: {message}"),
        )
    if as_program:
        print_json({"out": out, "was_finished": outcome.was_finished, "manifest": outcome.manifest})
    else:
        _print(outcome, path)


def _show_progress(line: ProgressLine, done: int, total: int, what: str) -> None:
    line.retitle(what)
    line(done, total, f"{format_bytes(done)} of {format_bytes(total)}" if total else "")


def _print(outcome: Outcome, out: Path) -> None:
    manifest = outcome.manifest
    if outcome.was_finished:
        say(f"{out} is finished: nothing is left to do")
    print_table(["stage", "rule", "documents", "bytes", "of documents"], _rows(manifest), align="llrrr")
    if manifest.set_aside:
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in manifest.set_aside.items())
        say(f"set aside, as set_aside.jsonl lists: {reasons}")
    say(
        f"wrote {out}: {manifest.documents:,} documents, {format_bytes(manifest.text_bytes)} of text in "
        f"{len(manifest.files):,} files"
    )


def _rows(manifest: Manifest) -> list[list[str]]:
    rows = [_row("read", "", manifest.input.read, manifest.input.read)]
    for stage in manifest.stages:
        for rule, amount in sorted(stage.dropped.items(), key=lambda each: (-each[1].documents, each[0])):
            rows.append(_row(stage.name, rule, amount, stage.entered, sign="-"))
        rows.append(_row(stage.name, "remain", stage.remained, stage.entered))
    return rows


def _row(stage: str, rule: str, amount: Amount, of: Amount, sign: str = "") -> list[str]:
    share = format_share(amount.documents / of.documents) if of.documents else "–"
    return [stage, rule, f"{sign}{amount.documents:,}", f"{sign}{format_bytes(amount.bytes)}", share]


@dataclass(frozen=True)
class WhyOptions(JsonOption):
    """Tell a document's story: where it comes from, what each stage did to it, and why it was dropped if it was."""

    identity: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ID")]
    """Identity of the document: the name of its file, #, and its number in it, such as pages/a.warc.gz#12."""
    corpus: Annotated[str, tyro.conf.arg(name="in")]
    """Folder of the corpus."""


@command("data why", WhyOptions)
def why_command(options: WhyOptions) -> None:
    from napkin.curation.engine.document_story import find_story

    story = find_story(Path(options.corpus), options.identity)
    if options.json:
        print_json(story)
        return
    say(f"{story.identity}: {story.ending}")
    rows = [["source", f"{story.source}, byte {story.offset:,}"]]
    rows += [["address", story.address]] if story.address else []
    rows += [["licence", story.licence]] if story.licence else []
    rows += [["found", f"{name} = {value}"] for name, value in story.fields.items()]
    rows += [[entry.stage, entry.note or "went on"] for entry in story.trace]
    print_table([], rows)


@dataclass(frozen=True)
class SamplesOptions:
    """Write a page with samples of what each rule of each stage dropped, beside samples of what remained."""

    corpus: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS")]
    """Folder of the corpus."""
    out: str | None = None
    """The page; None is samples.html in the folder of the corpus."""


@command("data samples", SamplesOptions)
def samples_command(options: SamplesOptions) -> None:
    from napkin.curation.engine.document_story import write_sample_page

    corpus = Path(options.corpus)
    path = corpus / "samples.html" if options.out is None else Path(options.out)
    say(f"wrote {write_sample_page(corpus, path)}")
