"""What seconds mean: model-FLOPs utilisation, dollars, kilowatt-hours."""

from napkin.accounting.ledger import Ledger


def dollars(seconds: float, usd_per_hour: float) -> float:
    """What `seconds` cost."""
    return seconds / 3600 * usd_per_hour


def kilowatt_hours(seconds: float, watts: float) -> float:
    """What `seconds` at so many watts use."""
    return seconds / 3600 * watts / 1000


def mfu(ledger: Ledger, seconds: float, matmul_peak: float) -> float:
    """Model-FLOPs utilisation: FLOPs of a step, recomputation left out, a second, over the dense peak.

    Chowdhery et al. 2022, "PaLM", appendix B; with attention counted over all pairs.
    """
    return ledger.flops / seconds / matmul_peak


def hfu(ledger: Ledger, seconds: float, matmul_peak: float) -> float:
    """Hardware-FLOPs utilisation: the same with recomputation counted."""
    return ledger.hardware_flops / seconds / matmul_peak
