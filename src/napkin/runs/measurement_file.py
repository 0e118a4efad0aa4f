"""measurement.json: the plan and the meter of a run side by side. The one declaration of it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from napkin.accounting.quantity_row import QuantityRow
from napkin.accounting.quantity_table import QuantityTable
from napkin.accounting.rank_seconds import RankSeconds
from napkin.accounting.run_measurement import Measurement, reconcile_run
from napkin.runs.plan_file import Natural, NonNegative
from napkin.runs.run_folder import RunFolder

MEASUREMENT_FILE = "measurement.json"


@dataclass(frozen=True)
class MeasurementFile:
    """The measurements of a process, written when it ends."""

    table: tuple[QuantityRow, ...]
    seconds: dict[str, float]
    """Seconds of each part of the run."""
    steps: Natural
    """Steps of the measured process: fewer than the run's if it was resumed."""
    mfu: NonNegative | None = None
    hfu: NonNegative | None = None
    ranks: tuple[RankSeconds, ...] = ()
    """Of each of several ranks, one step."""
    straggler: Natural | None = None
    """The rank for which the others waited; None where none stood out."""


def write_measurement(
    run: RunFolder,
    plan: Sequence[QuantityRow],
    measurement: Measurement,
    *,
    whole: bool,
    usd_per_hour: float | None = None,
    ranks: Sequence[RankSeconds] = (),
    straggler: int | None = None,
) -> QuantityTable:
    """Write the plan's table with the measurements of a process beside it, and return the table.

    `whole` is whether the process trained all steps of the run.
    """
    table = reconcile_run(plan, measurement, usd_per_hour=usd_per_hour)
    if not whole:
        # The plan's figure is for all steps, which this process did not measure.
        table = QuantityTable(
            dataclasses.replace(row, meter=None) if row.quantity == "seconds in all" else row for row in table
        )
    parts = measurement.seconds_by_part
    file = MeasurementFile(
        tuple(table), parts, measurement.steps, measurement.mfu, measurement.hfu, tuple(ranks), straggler
    )
    run.write_json(MEASUREMENT_FILE, file)
    return table
