"""`napkin report`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from napkin.cli.terminal import out, parse


@dataclass(frozen=True)
class ReportOptions:
    """Write a run's report.html from what its folder holds; a run still going can be reported at any time."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of the run."""


def main(arguments: list[str]) -> None:
    """Write the report anew."""
    options = parse(ReportOptions, "report", arguments)
    from napkin.report.page import write_report
    from napkin.training.run_folder import RunFolder

    out.print(f"wrote {write_report(RunFolder.open(options.run).path)}", soft_wrap=True)
