"""measurement.json: the plan and the meter of a run side by side."""

import dataclasses

from napkin.accounting.plan import Plan
from napkin.accounting.reconcile import Measurement, reconcile
from napkin.accounting.quantity_row import QuantityRow
from napkin.runs.run_folder import RunFolder


def write_measurement(run: RunFolder, plan: Plan, measurement: Measurement, *, whole: bool) -> list[QuantityRow]:
    """Write what the steps of a process came to beside their plan, and return it; `whole` where they are all."""
    table = reconcile(plan, measurement)
    if not whole:
        # The plan's figure is of all steps: there is nothing to put beside it yet.
        table = [dataclasses.replace(row, meter=None) if row.quantity == "seconds in all" else row for row in table]
    run.write_json(
        "measurement.json",
        {
            "table": table,
            "seconds": measurement.seconds_by_part,
            "mfu": measurement.mfu,
            "hfu": measurement.hfu,
            "steps": measurement.steps,
        },
    )
    return table
