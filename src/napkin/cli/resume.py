"""`napkin resume`."""

from dataclasses import dataclass

from napkin.cli.options import RunOptions, parse
from napkin.cli.progress import progress_line


@dataclass(frozen=True)
class ResumeOptions(RunOptions):
    """Continue a run from its newest intact checkpoint, as if it had never stopped."""


def main(arguments: list[str]) -> int:
    """Continue a run."""
    options = parse(ResumeOptions, "resume", arguments)
    from napkin.distributed.joining import join_ranks
    from napkin.runs.run_folder import RunFolder

    with join_ranks(RunFolder.open(options.run).recipe.training) as ranks:
        with progress_line("starting", shown=ranks.is_rank_zero) as line:
            from napkin.cli.train_and_report import train_and_report
            from napkin.training.start import open_run

            preparation, run = open_run(options.run, progress=line.retitle, ranks=ranks)
        return train_and_report(preparation, run, as_json=options.json)
