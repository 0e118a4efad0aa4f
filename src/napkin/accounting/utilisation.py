"""What seconds mean: model-FLOPs utilisation, dollars, kilowatt-hours."""

import math
from collections.abc import Iterable

from napkin.accounting.ledger import Ledger


def dollars(seconds: float, usd_per_hour: float) -> float:
    """What `seconds` cost."""
    return seconds / 3600 * usd_per_hour


def kilowatt_hours(seconds: float, watts: float) -> float:
    """What `seconds` at so many watts use."""
    return seconds / 3600 * watts / 1000


def mfu(ledger: Ledger, seconds: float, matmul_peak: float, *, steps: float = 1) -> float:
    """Model-FLOPs utilisation of steps: their FLOPs, recomputation left out, over their seconds times the dense peak.

    Chowdhery et al. 2022, "PaLM", appendix B; with attention counted over all pairs. Of several steps, `seconds` are
    those of all of them: neither their median nor a mean of rates. A step of other sizes may count as a part of one.
    """
    return steps * ledger.flops / seconds / matmul_peak


def hfu(ledger: Ledger, seconds: float, matmul_peak: float, *, steps: float = 1) -> float:
    """Hardware-FLOPs utilisation: the same with recomputation counted."""
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
