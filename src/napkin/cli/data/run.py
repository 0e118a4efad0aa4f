"""`napkin data run`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from napkin.cli.options import JsonOption, parse


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


def main(arguments: list[str]) -> None:
    """Run the pipeline."""
    options = parse(RunOptions, "data run", arguments)
    from napkin.cli.data.running import run_and_print
    from napkin.curation.pipeline_file import read_pipeline

    run_and_print(read_pipeline(options.pipeline), options.out, options.workers, as_program=options.json)
