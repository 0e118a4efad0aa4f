"""`napkin data run`."""

from dataclasses import dataclass
from typing import Annotated, Literal

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
    engine: Literal["processes", "ray"] = "processes"
    """Who works on shards: processes of this machine, or a Ray cluster whose nodes see the same files at the same
    paths."""
    ray_address: str | None = None
    """Of the Ray cluster, such as auto or 10.0.0.1:6379; None starts one on this machine."""


def main(arguments: list[str]) -> None:
    """Run the pipeline."""
    options = parse(RunOptions, "data run", arguments)
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
