"""`napkin report`."""

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
    from napkin.report.page import write_report
    from napkin.training.run_folder import RunFolder

    report = write_report(RunFolder.open(options.run).path)
    if options.json:
        print_json({"run": options.run, "report": report})
    else:
        out.print(f"wrote {report}", markup=False, soft_wrap=True)
