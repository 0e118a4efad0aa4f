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
    from napkin.distributed.ranks import joined
    from napkin.runs.run_folder import RunFolder

    with joined(RunFolder.open(options.run).recipe.training) as ranks:
        with progress_line("starting", shown=ranks.is_rank_zero) as line:
            from napkin.cli.train_view import start
            from napkin.training.start import open_run

            preparation, run = open_run(options.run, progress=line.retitle, ranks=ranks)
        return start(preparation, run, as_json=options.json)
