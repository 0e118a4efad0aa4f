"""The one declaration of plan.json, measurement.json and evaluation.json.

plan.json holds the prediction before the first step, which `napkin.planning` makes; measurement.json the plan and the
meter side by side; evaluation.json how well the model, and two general compressors, predict held-out text, which
`napkin.evaluation` computes.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, ClassVar

import msgspec

from napkin.accounting.pricing import Measurement, reconcile_run
from napkin.accounting.quantities import QuantityRow, QuantityTable
from napkin.accounting.rank_seconds import RankSeconds
from napkin.hardware.conditions import Conditions
from napkin.runs.run_folder import RunFolder

NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


@dataclass(frozen=True)
class PlannedDevice:
    """The devices that the plan was made for; figures are per device."""

    name: str
    kind: str
    """cpu or cuda."""
    matmul_peak: NonNegative
    """FLOP/s of dense matrix products in `format`."""
    format: str
    memory_bytes: NonNegative
    precision: str = ""


@dataclass(frozen=True)
class PlannedFile:
    """The share of a training file that the whole run reads."""

    path: str
    tokens: Natural
    epochs: NonNegative
    """Number of times that each of its documents is read."""
    share: NonNegative
    """The file's share of all windows that are read."""


@dataclass(frozen=True)
class PlannedFailures:
    """The expected cost of failures; the model is `napkin.accounting.failures`."""

    mtbf_seconds: NonNegative
    """Mean seconds between failures of all devices together."""
    restart_seconds: NonNegative
    """Seconds from a failure until training continues."""
    pause_seconds: NonNegative
    """Training waits so long for each checkpoint."""
    write_seconds: NonNegative
    """Seconds from the end of the pause until the checkpoint is durable."""
    interval_seconds: NonNegative
    """Seconds of work between two checkpoints."""
    best_interval_seconds: NonNegative
    longest_interval_seconds: NonNegative
    """Costs 1% more time than the best interval."""
    goodput: NonNegative
    """The part of the elapsed time that is useful, with a checkpoint each `interval_seconds`."""
    best_goodput: NonNegative
    interval_steps: Natural | None = None
    """training.checkpoint_every; None for a plan without steps, as for the next two."""
    best_interval_steps: Natural | None = None
    longest_interval_steps: Natural | None = None
    seconds: NonNegative | None = None
    """Seconds of all steps, with checkpoints and failures; None where the run would not end."""
    interruptions: NonNegative | None = None
    """Failures expected in these seconds."""
    dollars: NonNegative | None = None
    """The price of these seconds; None if unknown."""


@dataclass(frozen=True)
class PredictedLoss:
    """The validation loss that a scaling law predicts for the end of the run, in nats per token."""

    loss: NonNegative
    low: NonNegative
    """The lower end of the 90% interval for a single run."""
    high: NonNegative
    law: str
    """The law's name, and the file from which it was read."""
    extrapolation: NonNegative
    """The run's FLOPs over those of the largest run that the law was fitted to."""

    def __contains__(self, loss: float) -> bool:
        return self.low <= loss <= self.high


@dataclass(frozen=True)
class PlanFile:
    """Units are bytes, FLOPs and seconds, without prefixes; figures by category, phase, operator or module are of one
    step."""

    napkin: str
    created: datetime
    device: PlannedDevice
    steps: Natural
    tokens_per_step: Natural
    fits: bool
    seconds: NonNegative
    """Seconds of all steps."""
    peak_by_category: dict[str, NonNegative]
    flops_by_phase: dict[str, NonNegative]
    seconds_by_operator: dict[str, NonNegative]
    table: tuple[QuantityRow, ...]
    epochs: NonNegative | None = None
    """Tokens of all steps, divided by the tokens of the training files; None where there are none yet."""
    mixture: tuple[PlannedFile, ...] = ()
    """The training files where there are several; none in plans of earlier versions."""
    versions: dict[str, str] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)
    """Number formats of weights, gradients and so on."""
    checkpoint_bytes: Natural = 0
    seconds_factor: NonNegative = 1.0
    """Nine steps in ten are expected to take between seconds / factor and seconds · factor."""
    conditions: Conditions | None = None
    """Disturbance by other processes while the operators were timed; None where none were, and on a GPU."""
    dollars: NonNegative | None = None
    """The price of all steps; None if unknown."""
    kilowatt_hours: NonNegative | None = None
    seconds_by_phase: dict[str, NonNegative] = field(default_factory=dict)
    byte_bound_by_operator: dict[str, NonNegative] = field(default_factory=dict)
    """The part of these seconds that is bound by memory bandwidth."""
    seconds_by_module: dict[str, NonNegative] = field(default_factory=dict)
    byte_bound_by_module: dict[str, NonNegative] = field(default_factory=dict)
    communication: dict[str, NonNegative] = field(default_factory=dict)
    """Bytes that each device sends per step, their seconds, and the seconds that are not overlapped with
    computation."""
    compile: dict[str, Any] = field(default_factory=dict)
    deterministic: str = ""
    """The price of deterministic algorithms in a line; empty where the run takes none, and on a CPU."""
    unknown_operators: dict[str, Natural] = field(default_factory=dict)
    """Calls per step of operators whose FLOPs could not be counted."""
    pipeline_peak_bytes: tuple[Natural, ...] = ()
    """Planned for each rank of a pipeline; one for all ranks where they are alike; none in plans of earlier
    versions."""
    failures: PlannedFailures | None = None
    """None in plans of earlier versions."""
    predicted_loss: PredictedLoss | None = None
    """None where the plan was made without a law."""


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
    """One step of each rank, where there are several."""
    straggler: Natural | None = None
    """The rank that the others waited for; None if none stood out."""


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


@dataclass(frozen=True)
class Evaluation:
    """Bits per byte compares across tokenizers; loss and perplexity do not."""

    UNBOUNDED: ClassVar = ("perplexity",)

    step: Natural
    tokens: Natural
    """Tokens predicted, separators included."""
    bytes: Natural
    """UTF-8 bytes of the text, separators not included."""
    loss: float
    """Nats per token."""
    perplexity: NonNegative
    """exp(loss)."""
    bits_per_byte: NonNegative
    """Nats of all tokens / ln 2 / bytes: separators cost bits and add no bytes."""
    gzip_bits_per_byte: NonNegative
    """Bits per byte of `gzip -9` on the same bytes."""
    xz_bits_per_byte: NonNegative
    """Bits per byte of `xz -9` on the same bytes."""
