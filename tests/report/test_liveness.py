"""When a page says that the next one comes: never later than the end of the run, which writes one too."""

from datetime import UTC, datetime

import pytest

from napkin.report.page import liveness, render_report
from napkin.runs.accounting_files import PlanFile, PlannedDevice
from napkin.runs.run_record import RunRecord
from report.test_report_charts import logged

NOW = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC)


def run_at(step: int, steps: int, *, seconds_per_step: float = 2.0) -> RunRecord:
    device = PlannedDevice("cpu", "cpu", 1e12, "fp32", 1e9)
    plan = PlanFile("0", NOW, device, steps, 100, True, 1.0, {}, {}, {}, ())
    metrics = [
        logged(number, loss=3.0, step_seconds=seconds_per_step, seconds=seconds_per_step * number)
        for number in range(1, step + 1)
    ]
    return RunRecord("run", "", plan, tuple(metrics), None, None, None)


@pytest.mark.parametrize(
    ("every", "left", "due", "is_last"),
    [(30.0, 1000, 32, False), (339.0, 60, 120, True), (339.0, 1000, 341, False), (30.0, 0, 0, True)],
)
def test_the_next_page_is_due_after_a_step_or_when_the_run_ends(
    every: float, left: int, due: int, is_last: bool
) -> None:
    found = liveness(run_at(50, 50 + left), every, now=NOW)
    assert (found.due, found.is_last) == (due, is_last)


def test_before_the_first_step_only_the_interval_is_known() -> None:
    found = liveness(run_at(0, 10), 30.0, now=NOW)
    assert (found.due, found.is_last, found.next) == (30, False, "30 s")


def test_a_page_that_takes_long_to_write_does_not_promise_less_than_the_end_of_the_run() -> None:
    # The next page may be written in 5 min 39 s, and the run ends in two minutes.
    page = render_report(run_at(50, 110), training=True, every=lambda: 339.0)
    assert 'data-due="120"' in page
    assert '<span id="next">the next is due 2 min 00 s after that</span>, when the run is expected to end.' in page
    assert "is rewritten after the step of that moment, about every 5 min 39 s, and when the run ends." in page
    assert '<noscript><meta http-equiv="refresh" content="30"></noscript>' in page
