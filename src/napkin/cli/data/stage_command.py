"""`napkin data STAGE`: a pipeline of one stage, whose options are the fields of the stage."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from napkin.cli.options import INLINED, JsonOption, parse
from napkin.curation.engine.pipeline_file import InputOptions, OutputFormat, OutputOptions, Pipeline
from napkin.curation.reading.input_file import InputFormat
from napkin.curation.registry import stage_class
from napkin.errors import NapkinError


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


def run_stage(name: str, arguments: list[str]) -> None:
    """Run the command of a stage."""
    options: Any = parse(options_class(name), f"data {name}", arguments)
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
