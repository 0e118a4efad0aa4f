"""`napkin report`."""

import time
from dataclasses import dataclass

from napkin.cli.options import RunOptions, parse
from napkin.cli.terminal import notify, print_json, say


@dataclass(frozen=True)
class ReportOptions(RunOptions):
    """Write a run's report.html from what its folder holds; also while the run trains."""


def main(arguments: list[str]) -> None:
    """Write the report."""
    options = parse(ReportOptions, "report", arguments)
    from napkin.report.live_report import MAX_TIME_FRACTION
    from napkin.report.liveness import REFRESH_SECONDS
    from napkin.report.page import write_report
    from napkin.runs.metrics import METRICS_FILE, read_metrics_record
    from napkin.runs.run_folder import RunFolder, is_being_trained

    run = RunFolder.open(options.run).path
    begin = time.perf_counter()

    def next_page() -> float:
        # The training process writes the next page no sooner than its share of the time allows.
        return max(REFRESH_SECONDS, (time.perf_counter() - begin) / MAX_TIME_FRACTION)

    report = write_report(run, training=is_being_trained(run), every=next_page)
    for problem in read_metrics_record(run / METRICS_FILE).messages():
        notify(problem)
    if options.json:
        print_json({"run": options.run, "report": report})
    else:
        say(f"wrote {report}", wrap=False)
