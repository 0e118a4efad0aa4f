"""`napkin resume`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from napkin.cli.terminal import parse, progress_line


@dataclass(frozen=True)
class ResumeOptions:
    """Continue a run from its newest good checkpoint, as if it had never stopped."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of the run."""
    json: bool = False
    """Print the outcome for programs."""


def main(arguments: list[str]) -> int:
    """Continue a run."""
    options = parse(ResumeOptions, "resume", arguments)
    with progress_line("starting") as line:
        from napkin.cli.training import start
        from napkin.training.runs import old_run

        preparation, run = old_run(options.run, progress=line.retitle)
    return start(preparation, run, as_json=options.json)
