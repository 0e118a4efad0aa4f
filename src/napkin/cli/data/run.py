"""`napkin data run`, and `napkin data STAGE`: a pipeline of one stage, whose options are the fields of the stage."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from napkin.cli.commands import Main
from napkin.cli.common.options import INLINED, JsonOption, command
from napkin.curation.engine.pipeline_file import InputOptions, OutputFormat, OutputOptions, Pipeline
from napkin.curation.reading.input_file import InputFormat
from napkin.curation.registry import stage_class
from napkin.errors import NapkinError


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
    """Of the Ray cluster, such as auto or 10.0.0.1:6379; None starts one on this machine."""


@command("data run", RunOptions)
def run_command(options: RunOptions) -> None:
    from napkin.cli.data.running import run_and_print
    from napkin.curation.engine.pipeline_file import read_pipeline

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
    """What the commands of all stages have."""

    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT ...")] = ()
    """Files, folders, patterns such as 'crawl/*.warc.gz', and addresses that fsspec knows."""
    out: str = ""
    """Folder of the corpus."""
    input_format: InputFormat = "auto"
    """Of the files; `auto` is told by the end of each name."""
    text_field: str = InputOptions.text_field
    """The field of JSON lines, or column of Parquet, that is the text."""
    output_format: OutputFormat = "jsonl.zst"
    """Of the documents."""
    workers: int | None = None
    """Processes that work on shards; None is one per core."""
    memory_bytes: int = Pipeline.memory_bytes
    """What a stage that has to see all shards may hold."""


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
    from napkin.cli.data.running import run_and_print

    pipeline = Pipeline(
        InputOptions(options.paths, options.input_format, options.text_field),
        (options.stage,),
        OutputOptions(options.output_format),
        options.memory_bytes,
    )
    run_and_print(pipeline, options.out, options.workers, as_program=options.json)
