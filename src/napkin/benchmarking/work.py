"""What a call computes and moves, counted operator by operator, and the least seconds that a machine needs for it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from napkin.accounting.ledger import Ledger, Row
from napkin.accounting.pricing import price
from napkin.hardware.ceilings import Ceilings

Pass = Literal["forward", "backward", "both", "step"]
"""A forward pass as in training, which keeps what the backward pass needs; that backward pass alone; both; both and
the update."""


@dataclass(frozen=True)
class Work:
    """FLOPs, bytes and memory of one call, as counted."""

    flops: int
    """Of contractions, recomputation included; fused attention over the pairs that its mask leaves, which is what it
    computes."""
    bytes: int
    """That its operators read and write, each by itself: more than code needs in which they are fused."""
    peak_bytes: int
    """In tensors at one time; those of the whole step for any part of it."""
    roof_seconds: float
    """The longer of two times: FLOPs at the best rate of any product in their format, bytes at the bandwidth for arrays
    of the operators' sizes."""
    bound: Literal["FLOPs", "bytes"]
    """Which of them it is."""
    planned_seconds: float
    """By the rooflines of its operators one after the other, each with the overhead of its call."""


def work_of(ledger: Ledger, timed: Pass, ceilings: Ceilings) -> Work:
    """The work of one pass of a step; of a step that was counted without its other passes, that of the whole."""
    rows = [row for row in ledger.rows if _TIMED[timed](row)]
    flops: Counter[str] = Counter()
    for row in rows:
        if row.flops:
            share = row.causal_flops / row.flops if row.is_fused_attention else 1.0
            flops[row.format] += round((row.flops + row.recomputed_flops) * share)
    touched = [row.bytes_read + row.bytes_written for row in rows]
    arithmetic = sum(count / ceilings.matmul_peak(name) for name, count in flops.items())
    moving = sum(size / ceilings.bandwidth(size) for size in touched if size)
    only = Ledger(tuple(rows), ledger.parameters, ledger.peak_bytes, ledger.resident_bytes, {}, (), {})
    return Work(
        flops=flops.total(),
        bytes=sum(touched),
        peak_bytes=ledger.peak_bytes,
        roof_seconds=max(arithmetic, moving),
        bound="FLOPs" if arithmetic >= moving else "bytes",
        planned_seconds=price(only, ceilings).seconds,
    )


_TIMED: dict[Pass, Callable[[Row], bool]] = {
    "forward": lambda row: row.in_forward_pass,
    "backward": lambda row: not row.in_forward_pass and row.phase != "optimizer",
    "both": lambda row: row.phase != "optimizer",
    "step": lambda row: True,
}
