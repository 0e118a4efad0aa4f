"""Price a ledger on a machine: seconds by a roofline an operator, and whether the memory suffices.

An operator takes the longer of two times, that of its FLOPs at the measured rate for its format and shape and that of
its bytes at the measured bandwidth, and a fixed time to launch (Williams et al. 2009, "Roofline").
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from napkin.accounting.ledger import Ledger, Row
from napkin.hardware.calibration import Calibration

# A CPU's allocator takes blocks of at least this size from the system, and gives them back, each time.
FRESH_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Price:
    """What a step is predicted to take."""

    seconds: float
    seconds_by_operator: dict[str, float]
    """Largest first."""
    seconds_by_module: dict[str, float]
    """Largest first."""
    byte_bound_share: float
    """Share of the seconds in operators that wait for memory, not for arithmetic."""


def price(ledger: Ledger, calibration: Calibration, rehearsed: Mapping[Hashable, float] | None = None) -> Price:
    """Predict the seconds of a step on the calibrated machine.

    A call that was rehearsed there takes what it took (`rehearse`), every other one what its roofline says.
    """
    by_operator: defaultdict[str, float] = defaultdict(float)
    by_module: defaultdict[str, float] = defaultdict(float)
    total = byte_bound = 0.0
    for row in ledger.rows:
        seconds = (rehearsed or {}).get(row.call)
        if seconds is None:
            seconds = roofline_seconds(row, calibration)
        total += seconds
        byte_bound += seconds if _is_byte_bound(row, calibration) else 0.0
        by_operator[row.operator] += seconds
        by_module[row.module] += seconds
    return Price(total, _largest_first(by_operator), _largest_first(by_module), byte_bound / total)


def roofline_seconds(row: Row, calibration: Calibration) -> float:
    """Seconds of one call: FLOPs or bytes, whichever takes longer; memory taken from the system; the launch."""
    fresh = row.bytes_allocated * calibration.seconds_per_fresh_byte if row.bytes_allocated >= FRESH_BYTES else 0.0
    bound = max(_seconds_of_flops(row, calibration), _seconds_of_bytes(row, calibration))
    return bound + fresh + calibration.seconds_per_operator


def _is_byte_bound(row: Row, calibration: Calibration) -> bool:
    return _seconds_of_bytes(row, calibration) > _seconds_of_flops(row, calibration)


def _largest_first(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _seconds_of_flops(row: Row, calibration: Calibration) -> float:
    if row.contraction is None:
        return 0.0
    _, m, n, k = row.contraction
    return (row.flops + row.recomputed_flops) / calibration.matmul_rate(row.format, m, n, k)


def _seconds_of_bytes(row: Row, calibration: Calibration) -> float:
    touched = row.bytes_read + row.bytes_written
    return touched / calibration.bandwidth(touched) if touched else 0.0
