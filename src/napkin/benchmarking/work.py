"""The work of a call: FLOPs and bytes, counted operator by operator, and the least seconds that a machine needs for
them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from napkin.accounting.ledger import Ledger, Row
from napkin.accounting.pricing import computed_flops, price, roofs_of
from napkin.hardware.ceilings import Ceilings

Pass = Literal["forward", "backward", "both", "step"]
"""A forward pass as in training, which keeps what the backward pass needs; that backward pass alone; both; both and
the update."""


@dataclass(frozen=True)
class Work:
    """FLOPs, bytes and memory of one call, as counted."""

    flops: int
    """FLOPs of contractions, recomputation included; of fused attention those of the pairs that its mask leaves."""
    bytes: int
    """Bytes that its operators read and write, each by itself: more than code needs in which they are fused."""
    peak_bytes: int
    """Bytes of tensors at one time; those of the whole step for any part of it."""
    roof_seconds: float
    """The longer of two times: FLOPs at the best rate of any product in their format, bytes at the bandwidth for arrays
    of the operators' sizes."""
    bound: Literal["FLOPs", "bytes"]
    """The larger of the two times."""
    planned_seconds: float
    """Seconds by the rooflines of its operators one after the other, each with the overhead of its call."""


def work_of(ledger: Ledger, timed: Pass, ceilings: Ceilings) -> Work:
    """The work of one pass of a counted step."""
    rows = tuple(row for row in ledger.rows if _TIMED[timed](row))
    roofs = roofs_of(rows, ceilings)
    arithmetic, moving = (sum(each) for each in zip((0.0, 0.0), *map(roofs.seconds, rows), strict=True))
    return Work(
        flops=round(sum(map(computed_flops, rows))),
        bytes=sum(row.bytes_read + row.bytes_written for row in rows),
        peak_bytes=ledger.peak_bytes,
        roof_seconds=max(arithmetic, moving),
        bound="FLOPs" if arithmetic >= moving else "bytes",
        planned_seconds=price(replace(ledger, rows=rows, timeline=()), ceilings).seconds,
    )


_TIMED: dict[Pass, Callable[[Row], bool]] = {
    "forward": lambda row: row.in_forward_pass,
    "backward": lambda row: not row.in_forward_pass and row.phase != "optimizer",
    "both": lambda row: row.phase != "optimizer",
    "step": lambda row: True,
}
