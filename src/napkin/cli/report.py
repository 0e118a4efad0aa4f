"""`napkin report`."""

import time
from dataclasses import dataclass

from napkin.cli.options import RunFolderArgument, Switch, parse
from napkin.cli.terminal import out, print_json


@dataclass(frozen=True)
class ReportOptions:
    """Write a run's report.html from what its folder holds; a run still going can be reported at any time."""

    run: RunFolderArgument
    """Folder of the run."""
    json: Switch = False
    """Print the path for programs."""


def main(arguments: list[str]) -> None:
    """Write the report anew."""
    options = parse(ReportOptions, "report", arguments)
    from napkin.report.live_report import MOST_OF_THE_TIME
    from napkin.report.liveness import REFRESH_SECONDS
    from napkin.report.page import write_report
    from napkin.runs.lock import is_being_trained
    from napkin.runs.run_folder import RunFolder

    run = RunFolder.open(options.run).path
    begin = time.perf_counter()

    def next_page() -> float:
        # No sooner than what the training process itself can afford.
        return max(REFRESH_SECONDS, (time.perf_counter() - begin) / MOST_OF_THE_TIME)

    report = write_report(run, training=is_being_trained(run), every=next_page)
    if options.json:
        print_json({"run": options.run, "report": report})
    else:
        out.print(f"wrote {report}", markup=False, soft_wrap=True)
