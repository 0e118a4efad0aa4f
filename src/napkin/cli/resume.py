"""`napkin resume`."""

from dataclasses import dataclass

from napkin.cli.options import RunFolderArgument, Switch, parse
from napkin.cli.terminal import progress_line


@dataclass(frozen=True)
class ResumeOptions:
    """Continue a run from its newest good checkpoint, as if it had never stopped."""

    run: RunFolderArgument
    """Folder of the run."""
    json: Switch = False
    """Print the outcome for programs."""


def main(arguments: list[str]) -> int:
    """Continue a run."""
    options = parse(ResumeOptions, "resume", arguments)
    with progress_line("starting") as line:
        from napkin.cli.training import start
        from napkin.training.runs import old_run

        preparation, run = old_run(options.run, progress=line.retitle)
    return start(preparation, run, as_json=options.json)
