"""Put the meter beside rule and count, once a run has ended."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from napkin.accounting.quantity_row import QuantityRow
from napkin.accounting.quantity_table import QuantityTable
from napkin.accounting.utilisation import dollars
from napkin.hardware.conditions import Conditions

ALONE = "seconds per step, alone"
"""The row of a step's seconds without other processes, where they disturbed the run."""


@dataclass(frozen=True)
class Measurement:
    """What a run turned out to be."""

    parameters: int
    flops: int
    """Of one real step, by the operators that ran."""
    peak_bytes: int
    """Of one real step, by the allocator."""
    seconds_per_step: float
    """Median over the steps, without the one that was watched."""
    seconds: float
    """Of the whole training, evaluations and checkpoints included."""
    steps: int
    mfu: float
    """Of all steps together, without the one that was watched: FLOPs over summed seconds."""
    hfu: float
    seconds_by_part: dict[str, float]
    """data, forward, backward, optimizer, evaluation, checkpoints, compiling, other."""
    validation_loss: float | None = None
    """After the last step of the run, in nats per token."""
    further: Mapping[str, float] = field(default_factory=dict)
    """What only some kinds of training have, by the names of their rows."""
    seconds_alone: float | None = None
    """Seconds of a step without the other processes that disturbed the run; None where none did."""
    conditions: Conditions | None = None
    """What other processes did while the run trained, where that is known."""


def reconcile_run(
    table: Sequence[QuantityRow], measurement: Measurement, *, usd_per_hour: float | None = None
) -> QuantityTable:
    """A plan's table with its third column filled; `usd_per_hour` is the price of all devices, where it is known."""
    meters = {
        "parameters": measurement.parameters,
        "FLOPs per step": measurement.flops,
        "peak bytes": measurement.peak_bytes,
        "seconds per step": measurement.seconds_per_step,
        "MFU": measurement.mfu,
        "seconds in all": measurement.seconds,
        "validation loss": measurement.validation_loss,
        "seconds to compile": measurement.seconds_by_part.get("compiling"),
        **measurement.further,
    }
    if usd_per_hour is not None:
        meters["dollars"] = dollars(measurement.seconds, usd_per_hour)
    # The power that the devices drew is not metered.
    rows = [dataclasses.replace(row, meter=meters.get(row.quantity)) for row in table]
    if measurement.seconds_alone is not None and measurement.conditions is not None:
        names = [row.quantity for row in rows]
        place = names.index("seconds per step")
        note = f"of a busy machine's processor time: while the run trained, {measurement.conditions.describe()}"
        alone = dataclasses.replace(rows[place], quantity=ALONE, rule=None, meter=measurement.seconds_alone, note=note)
        rows.insert(place + 1, alone)
    return QuantityTable(rows)
