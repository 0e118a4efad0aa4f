"""measurement.json: the plan and the meter of a run side by side. The one declaration of it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from napkin.accounting.quantity_row import QuantityRow
from napkin.accounting.reconcile import Measurement, reconcile
from napkin.runs.run_folder import RunFolder


@dataclass(frozen=True)
class MeasurementFile:
    """What the meter read, once a process has ended."""

    table: tuple[QuantityRow, ...]
    seconds: dict[str, float]
    """By what they were spent on."""
    steps: int
    """Of the process that was metered: fewer than the run has where it was resumed."""
    mfu: float | None = None
    hfu: float | None = None


def write_measurement(
    run: RunFolder,
    plan: Sequence[QuantityRow],
    measurement: Measurement,
    *,
    whole: bool,
    usd_per_hour: float | None = None,
) -> list[QuantityRow]:
    """Write what the steps of a process came to beside the plan's table, and return it; `whole` where they are all."""
    table = reconcile(plan, measurement, usd_per_hour=usd_per_hour)
    if not whole:
        # The plan's figure is of all steps: there is nothing to put beside it yet.
        table = [dataclasses.replace(row, meter=None) if row.quantity == "seconds in all" else row for row in table]
    parts = measurement.seconds_by_part
    file = MeasurementFile(tuple(table), parts, measurement.steps, measurement.mfu, measurement.hfu)
    run.write_json("measurement.json", file)
    return table
