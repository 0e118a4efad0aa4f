"""Price a ledger on a machine: seconds by a roofline an operator, and whether the memory suffices.

An operator takes the longer of two times, that of its FLOPs at the measured rate for its format and shape and that of
its bytes at the measured bandwidth, and a fixed time to launch (Williams et al. 2009, "Roofline").
"""

from collections import Counter
from dataclasses import dataclass

from napkin.accounting.ledger import Ledger, Row
from napkin.hardware.calibration import Calibration


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


def price(ledger: Ledger, calibration: Calibration) -> Price:
    """Predict the seconds of a step on the calibrated machine."""
    by_operator: Counter[str] = Counter()
    by_module: Counter[str] = Counter()
    total = byte_bound = 0.0
    for row in ledger.rows:
        arithmetic, traffic = _seconds_of_flops(row, calibration), _seconds_of_bytes(row, calibration)
        seconds = max(arithmetic, traffic) + calibration.overhead_seconds
        total += seconds
        byte_bound += seconds if traffic > arithmetic else 0.0
        by_operator[row.operator] += seconds
        by_module[row.module] += seconds
    return Price(total, dict(by_operator.most_common()), dict(by_module.most_common()), byte_bound / total)


def _seconds_of_flops(row: Row, calibration: Calibration) -> float:
    if row.contraction is None:
        return 0.0
    _, m, n, k = row.contraction
    return (row.flops + row.recomputed_flops) / calibration.matmul_rate(row.format, m, n, k)


def _seconds_of_bytes(row: Row, calibration: Calibration) -> float:
    touched = row.bytes_read + row.bytes_written
    return touched / calibration.bandwidth(touched) if touched else 0.0
