"""Price a ledger on a machine: seconds of each operator by its roofline or by microbenchmark, and what bounds them.

By its roofline, an operator takes the longer of two times, that of its FLOPs at the rate for its format and shape and
that of its bytes at the memory bandwidth, and a fixed time to launch (Williams et al. 2009, "Roofline").

Below: the roofs over one operator; the time that a training loop takes besides the work of its steps; whether compiling
pays, by the seconds that fused operators save over a run and those that the compiler takes; what seconds mean (MFU,
dollars, kilowatt-hours); and `reconcile`, which puts the meter beside rule and count once a run has ended.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from napkin.accounting.ledger import Ledger, Row, numbered_alike
from napkin.accounting.quantities import Line, QuantityRow, QuantityTable, Summary, largest
from napkin.errors import NapkinError
from napkin.hardware.ceilings import Ceilings
from napkin.hardware.conditions import Conditions
from napkin.units import format_seconds, format_share

Name = TypeVar("Name", bound=Hashable)

# A CPU's allocator gets blocks of at least this size from the operating system, and returns them, each time.
FRESH_BYTES = 32 * 2**20

ROOFLINE_FACTOR = 3.0
"""Factor by which a step's seconds may be off by rooflines alone, which know no exponentials and no non-contiguous
strides."""


CallSite = tuple[str, str, str]
"""(operator, path of the module, phase), which tells the calls of a step apart."""


@dataclass(frozen=True)
class Spent:
    """Seconds of one part of a step, and those of them that are bound by memory, not by arithmetic."""

    seconds: float
    byte_bound_seconds: float


@dataclass(frozen=True, repr=False)
class Price(Summary):
    """The predicted seconds of a step."""

    seconds: float
    byte_bound_seconds: float
    """Seconds of those in operators that are bound by memory, not by arithmetic."""
    by_operator: dict[str, Spent]
    """Seconds by operator, largest first."""
    by_module: dict[str, Spent]
    """Largest first; modules whose paths differ only by a number are summed: "blocks.*.attention"."""
    by_phase: dict[str, Spent]
    """Seconds by phase, largest first."""
    factor: float
    """Factor of uncertainty: in nine cases of ten a step is expected to take between seconds / factor and seconds ·
    factor."""
    by_call_site: dict[CallSite, Spent] = field(default_factory=dict)
    """Seconds by call site, largest first; the paths of modules have their numbers."""
    conditions: Conditions | None = None
    """Use of the processor by other processes while operators were timed; None where none were, and on a GPU."""

    @property
    def disturbed(self) -> bool:
        """True if other processes disturbed the timing of operators: the seconds are an upper bound."""
        return self.conditions is not None and self.conditions.busy

    @property
    def byte_bound_share(self) -> float:
        """Fraction of the seconds in operators that are bound by memory, not by arithmetic."""
        return self.byte_bound_seconds / self.seconds

    def summary(self) -> Iterator[Line]:
        bound = format_share(self.byte_bound_share) if self.seconds else "none"
        yield "Price", f"{format_seconds(self.seconds)} per step, within a factor of {self.factor:.2f}"
        yield "bound by bytes", f"{bound} of the time"
        for name, parts in (("phase", self.by_phase), ("operator", self.by_operator), ("module", self.by_module)):
            named = ((part or "(no module)", spent.seconds) for part, spent in parts.items())
            yield f"by {name}", "; ".join(f"{part} {format_seconds(seconds)}" for part, seconds in largest(named))


def price(
    ledger: Ledger,
    ceilings: Ceilings,
    timed: Mapping[Hashable, float] | None = None,
    *,
    between: float = 1.0,
    factor: float = ROOFLINE_FACTOR,
    conditions: Conditions | None = None,
) -> Price:
    """Predict the seconds of a step on a machine.

    Args:
        ledger: the step.
        ceilings: the machine: a `Calibration`, or `CatalogueCeilings` of a device that is not at hand.
        timed: seconds of calls that were run there alone (`time_operators`); the seconds of all others are those of
            their roofline.
        between: how much longer a step takes than the sum of its operators, as a factor that each is multiplied by.
        factor: how far off the result may be, up or down, in nine cases of ten.
        conditions: what other processes did while the calls were run.
    """
    known = timed or {}
    sites: defaultdict[CallSite, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in ledger.rows:
        seconds = known.get(row.call)
        seconds = between * (roofline_seconds(row, ceilings) if seconds is None else seconds)
        byte_bound = seconds if _seconds_of_bytes(row, ceilings) > _seconds_of_flops(row, ceilings) else 0.0
        spent = sites[row.operator, row.module, row.phase]
        spent[0] += seconds
        spent[1] += byte_bound
    by_phase = _summed(sites, lambda site: site[2])
    return Price(
        seconds=sum(spent.seconds for spent in by_phase.values()),
        byte_bound_seconds=sum(spent.byte_bound_seconds for spent in by_phase.values()),
        by_operator=_summed(sites, lambda site: site[0]),
        by_module=_summed(sites, lambda site: numbered_alike(site[1])),
        by_phase=by_phase,
        factor=factor,
        by_call_site=_summed(sites, lambda site: site),
        conditions=conditions,
    )


def roofline_seconds(row: Row, ceilings: Ceilings) -> float:
    """Seconds of one call: FLOPs or bytes, whichever takes longer; fresh memory from the system; the launch. Of a
    product whose seconds were measured by shape, what the curve has.

    A collective takes none: its seconds are those of the interconnect.
    """
    if row.collective is not None:
        return 0.0
    by_curve = _seconds_by_curve(row, ceilings)
    if by_curve is not None:
        return by_curve
    fresh = row.bytes_allocated * ceilings.seconds_per_fresh_byte if row.bytes_allocated >= FRESH_BYTES else 0.0
    bound = max(_seconds_of_flops(row, ceilings), _seconds_of_bytes(row, ceilings)) + fresh
    if ceilings.calls_overlap:
        # A view launches no kernel, and its call is hidden behind kernels that run.
        return bound + ceilings.seconds_per_operator if bound else 0.0
    return bound + ceilings.seconds_per_operator


def _seconds_by_curve(row: Row, ceilings: Ceilings) -> float | None:
    """Seconds of the kernel of a product, where the machine has a curve; of more FLOPs, in proportion."""
    if row.contraction is None or not row.flops or row.is_fused_attention:
        return None
    batch, m, n, k = row.contraction
    seconds = ceilings.product_seconds(row.format, batch, m, n, k)
    return None if seconds is None else seconds * (row.flops + row.recomputed_flops) / (2 * batch * m * n * k)


def price_with_launches(ledger: Ledger, ceilings: Ceilings, *, factor: float) -> Price:
    """Price a step by rooflines on a device that is not at hand. Published steps, which `factor` is of, are long: it is
    wider where launches take a large part."""
    priced = price(ledger, ceilings)
    return dataclasses.replace(priced, factor=factor * (1 + launch_share(ledger, ceilings, priced.seconds)))


def launch_share(ledger: Ledger, ceilings: Ceilings, seconds: float) -> float:
    """Fraction of a step's `seconds` that is the overhead of operator calls; a view is none."""
    calls = sum(bool(row.flops or row.bytes_read or row.bytes_written) for row in ledger.rows)
    return calls * ceilings.seconds_per_operator / (seconds or 1.0)


def _summed(sites: Mapping[CallSite, list[float]], name_of: Callable[[CallSite], Name]) -> dict[Name, Spent]:
    """The sites that have a name in common together, largest first."""
    sums: defaultdict[Name, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for site, (seconds, byte_bound) in sites.items():
        spent = sums[name_of(site)]
        spent[0] += seconds
        spent[1] += byte_bound
    return {name: Spent(*spent) for name, spent in sorted(sums.items(), key=lambda item: -item[1][0])}


def _seconds_of_flops(row: Row, ceilings: Ceilings) -> float:
    if row.contraction is None or not row.flops:
        return 0.0
    batch, m, n, k = row.contraction
    flops = row.flops + row.recomputed_flops
    if row.is_fused_attention:
        # Tiles above the diagonal are skipped.
        rate = ceilings.attention_rate(row.format, m, n, k, heads=batch, cudnn="cudnn" in row.operator)
        return flops * row.causal_flops / row.flops / rate
    return flops / ceilings.matmul_rate(row.format, m, n, k)


def _seconds_of_bytes(row: Row, ceilings: Ceilings) -> float:
    touched = row.bytes_read + row.bytes_written
    return touched / ceilings.bandwidth(touched) if touched else 0.0


# Williams et al. 2009, "Roofline": no operator is faster than the slower of the two allows.

MAIN_MEMORY = float("inf")


@dataclass(frozen=True)
class Roofs:
    """The most that a machine can do."""

    peaks: dict[str, float]
    """FLOP/s of matrix products, of each format that the step multiplies in."""
    bandwidth: float
    """Bytes/s to and from main memory."""
    ceilings: Ceilings

    def seconds(self, row: Row) -> tuple[float, float]:
        """Lower bounds on the seconds of a call: for its FLOPs, and for its bytes at the bandwidth that transfers of
        this size reach."""
        touched = row.bytes_read + row.bytes_written
        by_bytes = touched / self.ceilings.bandwidth(touched) if touched else 0.0
        peak = self.peaks.get(row.format)
        return computed_flops(row) / peak if peak else 0.0, by_bytes


def roofs_of(rows: Iterable[Row], ceilings: Ceilings) -> Roofs:
    """The roofs for the operators of a step; a format that the machine was not measured in has none for its FLOPs."""
    peaks: dict[str, float] = {}
    for name in dict.fromkeys(row.format for row in rows if row.flops):
        try:
            peaks[name] = ceilings.matmul_peak(name)
        except NapkinError:
            continue
    return Roofs(peaks, ceilings.bandwidth(MAIN_MEMORY), ceilings)


def computed_flops(row: Row) -> float:
    """FLOPs that a call computes: with recomputation, and of fused attention the pairs that its mask leaves."""
    flops = float(row.flops + row.recomputed_flops)
    return flops * row.causal_flops / row.flops if row.is_fused_attention and row.flops else flops


def loop_overhead(seconds_by_part: Mapping[str, float]) -> tuple[float, float] | None:
    """Seconds that the loop adds to its steps, and their fraction of all step time; None if no step was timed.

    They are all but forward, backward and optimizer: waiting for data, checks, metrics, progress, trackers and
    everything else that is not timed separately. Evaluations, checkpoints and the metered step are not in them.
    """
    computed = sum(seconds_by_part.get(part, 0.0) for part in ("forward", "backward", "optimizer"))
    added = sum(seconds_by_part.get(part, 0.0) for part in ("data", "other"))
    return (added, added / (computed + added)) if computed > 0 else None


# A compiler fuses what stands between the matrix products of a block (norms, activations, changes of format, residual
# sums) and leaves the products as they are. What it saves is a multiple of what rooflines give for those operators,
# whose tensors would otherwise go through memory one by one. Rooflines, not microbenchmarks: they say the same each
# time.

SAVED = {
    # Two cores of an AMD EPYC with avx512_bf16, torch 2.13, width 256, batch 16 × 256: of 0.5 s a step 13 ms were saved
    # with micro-batches of 16 and 16 ms with 8 and 4 (medians of 25), where 9 to 10 ms are the rooflines'. At width 128
    # it was 2.6%, at 512 2 to 3.5%. In fp32 nothing was saved.
    ("cpu", "bf16"): 1.5,
    ("cpu", "bf16-pure"): 1.5,
    ("cpu", "fp32"): 0.0,
}
"""Seconds saved over the rooflines' seconds of the operators that fuse, by device and precision, as measured."""
MOST_SAVED = 0.1
"""Share of a step's seconds by rooflines, on a CPU, that compiling saves at most: more was never measured, and small
operators' rooflines are mostly calls."""
SECONDS = 26.0
"""Seconds of compiling the forward and the backward pass of a block on a CPU, where the disk holds nothing of it yet,
on two cores of the same machine, whatever the number of layers; 5 where it does."""
ASSUMED_SECONDS_ON_GPU = 60.0
"""Seconds of compiling on a GPU: assumed, not measured."""


@dataclass(frozen=True)
class CompileEstimate:
    """Cost and gain of compiling, and whether it was chosen."""

    chosen: bool = False
    why_not: str | None = None
    """The obstacle that rules it out, whatever it would save."""
    seconds: float = 0.0
    """Seconds that compiling takes, once."""
    saved_per_step: float = 0.0
    assumed: bool = False
    """True if both figures are assumptions, for a device on which nothing was measured."""

    @property
    def seconds_once(self) -> float:
        """Seconds of compiling in a run: 0 where nothing is compiled."""
        return self.seconds if self.chosen else 0.0

    @property
    def seconds_less(self) -> float:
        """Seconds saved in each step: 0 where nothing is compiled."""
        return self.saved_per_step if self.chosen else 0.0

    def pays(self, steps: int) -> bool:
        """True if so many steps save more seconds than compiling takes."""
        return steps * self.saved_per_step > self.seconds


NOT_COMPILED = CompileEstimate()


def estimate_compile(ledger: Ledger, ceilings: Ceilings, *, device_type: str, precision: str) -> CompileEstimate:
    """Estimate what compiling the blocks would take and save; `chosen` is left to the caller.

    A precision for which nothing was measured is taken to save nothing.
    """
    fusible = fusible_seconds(ledger, ceilings)
    if device_type != "cpu":
        # Published runs with and without a compiler say what remains: `napkin.hardware.ceilings`.
        saved = (1 - ceilings.fused_share) * fusible
        return CompileEstimate(seconds=ASSUMED_SECONDS_ON_GPU, saved_per_step=saved, assumed=True)
    saved = min(SAVED.get((device_type, precision), 0.0) * fusible, MOST_SAVED * price(ledger, ceilings).seconds)
    return CompileEstimate(seconds=SECONDS, saved_per_step=saved)


def fusible_seconds(ledger: Ledger, ceilings: Ceilings) -> float:
    """Seconds per step, by rooflines, of the operators inside blocks that are neither matrix products nor attention."""
    return sum(
        roofline_seconds(row, ceilings)
        for row in ledger.rows
        if row.contraction is None and row.module.startswith("blocks.") and row.phase != "optimizer"
    )


def dollars(seconds: float, usd_per_hour: float) -> float:
    return seconds / 3600 * usd_per_hour


def kilowatt_hours(seconds: float, watts: float) -> float:
    """Energy of `seconds` at so many watts."""
    return seconds / 3600 * watts / 1000


def mfu(ledger: Ledger, seconds: float, matmul_peak: float, *, steps: float = 1) -> float:
    """Model-FLOPs utilisation of steps: their FLOPs, recomputation left out, over their seconds times the dense peak.

    Chowdhery et al. 2022, "PaLM", appendix B; with attention counted over all pairs. Of several steps, `seconds` are
    those of all of them: neither their median nor a mean of rates. A step of other sizes may count as a part of one.
    """
    return steps * ledger.flops / seconds / matmul_peak


def hfu(ledger: Ledger, seconds: float, matmul_peak: float, *, steps: float = 1) -> float:
    """Hardware-FLOPs utilisation: `mfu` with recomputation counted."""
    return steps * ledger.hardware_flops / seconds / matmul_peak


def mfu_of_steps(steps: Iterable[tuple[float | None, float | None]]) -> float | None:
    """The MFU of several steps together, each given as its own MFU and its seconds; None if neither is known of any.

    FLOPs over summed seconds, as `mfu` has it: a step's MFU times its seconds is its FLOPs over the peak.

    >>> mfu_of_steps([(0.5, 1.0), (0.25, 2.0), (None, 3.0)])
    0.3333333333333333
    """
    known = [(share or math.nan, seconds or math.nan) for share, seconds in steps]
    known = [(share, seconds) for share, seconds in known if share * seconds > 0]
    whole = sum(seconds for _, seconds in known)
    return sum(share * seconds for share, seconds in known) / whole if known else None


ALONE = "seconds per step, alone"
"""The row of a step's seconds without other processes, where they disturbed the run."""


@dataclass(frozen=True)
class Measurement:
    """The figures of a run that has ended."""

    parameters: int
    flops: int
    """FLOPs of one real step, by the operators that ran."""
    peak_bytes: int
    """Peak bytes of one real step, by the allocator."""
    seconds_per_step: float
    """Median over the steps, without the one that was watched."""
    seconds: float
    """Seconds of the whole training, evaluations and checkpoints included."""
    steps: int
    mfu: float
    """Utilisation in all steps together, without the one that was watched: FLOPs over summed seconds."""
    hfu: float
    seconds_by_part: dict[str, float]
    """data, forward, backward, optimizer, evaluation, checkpoints, compiling, other."""
    validation_loss: float | None = None
    """Loss after the last step of the run, in nats per token."""
    further: Mapping[str, float] = field(default_factory=dict)
    """Figures that only some kinds of training have, by the names of their rows."""
    seconds_alone: float | None = None
    """Seconds of a step without the other processes that disturbed the run; None where none did."""
    conditions: Conditions | None = None
    """Use of the processor by other processes while the run trained, where that is known."""


def reconcile_run(
    table: Sequence[QuantityRow], measurement: Measurement, *, usd_per_hour: float | None = None
) -> QuantityTable:
    """A plan's table with its meter column filled; `usd_per_hour` is the price of all devices, where it is known."""
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
