"""One MFU everywhere: FLOPs over summed seconds."""

from pathlib import Path

import pytest

from napkin.accounting.ledger import Ledger, Row
from napkin.accounting.pricing import mfu, mfu_of_steps
from napkin.report.comparison import read_run
from napkin.report.headline import key_figures
from napkin.runs.run_record import read_run_record
from napkin.training.run import create_run, train_run
from napkin.units import format_share
from oracles.tiny_run import tiny_recipe, write_tiny_text


@pytest.mark.thorough
def test_measurement_runs_list_and_report_show_one_mfu(tmp_path: Path) -> None:
    write_tiny_text(tmp_path)
    preparation, run = create_run(tiny_recipe(tmp_path, steps=12, log_every=1), tmp_path / "run")
    outcome = train_run(preparation, run)
    plan, measurement = preparation.plan, outcome.measurement
    assert plan is not None
    assert measurement is not None
    record = read_run_record(run.path)

    def shown() -> str:
        return next(figure.value for figure in key_figures(read_run_record(run.path)) if figure.label == "MFU")

    assert measurement.mfu == record.mfu == read_run(run.path, training=False).summary.mfu
    assert shown() == format_share(measurement.mfu)
    assert next(row.meter for row in outcome.table if row.quantity == "MFU") == measurement.mfu

    # While a run goes on there are its logged steps alone: the same sum, over those.
    (run.path / "measurement.json").unlink()
    seconds = [logged.step_seconds for logged in record.metrics]
    assert len(seconds) == 12
    by_hand = 12 * plan.ledger.flops / sum(filter(None, seconds)) / plan.site.matmul_peak
    assert read_run(run.path, training=True).summary.mfu == pytest.approx(by_hand, rel=1e-12)
    assert shown() == format_share(by_hand)


def ledger_of(flops: int) -> Ledger:
    """One that has nothing but FLOPs."""
    row = Row("", "forward", "mm", "fp32", flops, flops, 0, (1, 1, 1, flops // 2), 0, 0, 0, 0)
    return Ledger((row,), 0, 0, 0, {}, (), {})


def test_the_mfu_of_steps_is_neither_a_mean_of_rates_nor_that_of_the_median() -> None:
    seconds = [1.0, 1.0, 10.0]
    each: list[tuple[float | None, float | None]] = [(mfu(ledger_of(600), took, 1000.0), took) for took in seconds]
    together = mfu(ledger_of(600), sum(seconds), 1000.0, steps=3)
    assert mfu_of_steps(each) == pytest.approx(together) == pytest.approx(0.15)
    assert mfu_of_steps([]) is mfu_of_steps([(None, 1.0), (0.5, None)]) is None
