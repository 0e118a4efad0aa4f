"""The roofs over an operator: its FLOPs at the machine's peak, and its bytes at the machine's bandwidth.

Williams et al. 2009, "Roofline": no operator is faster than the slower of the two allows.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from napkin.accounting.ledger import Row
from napkin.errors import NapkinError
from napkin.hardware.ceilings import Ceilings

MAIN_MEMORY = float("inf")


@dataclass(frozen=True)
class Roofs:
    """What a machine can do at most."""

    peaks: dict[str, float]
    """FLOP/s of matrix products, of each format that the step multiplies in."""
    bandwidth: float
    """Bytes/s to and from main memory."""
    ceilings: Ceilings

    def seconds(self, row: Row) -> tuple[float, float]:
        """Least seconds of a call for its FLOPs, and for its bytes, at the bandwidth for so many of them."""
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
