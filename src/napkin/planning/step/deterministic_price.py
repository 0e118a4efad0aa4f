"""The price of bit-for-bit reproducibility: a step with deterministic algorithms compared with one without, by count
and by rule.

The count has other forms of attention, more sums of the gradient of queries, and other workspaces. Costs that a
roofline does not show are added by rule:

- Flash attention's backward pass has one program for each sum of the gradient of queries, in place of one for each
  block of keys: the last wave of programs leaves multiprocessors idle. The sums are cleared before and read after.
- Memory-efficient attention's backward pass has one program for each head of a sequence.
- A sum by index sorts its indices, and reads and writes its rows once more.
"""

from dataclasses import dataclass

from napkin.accounting.cuda.scratch import ordered_sums
from napkin.accounting.ledger import Ledger, Row
from napkin.accounting.pricing import price, roofline_seconds
from napkin.hardware.ceilings import Ceilings
from napkin.hardware.target import CudaTarget, cuda_target
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step_ledger import count_step
from napkin.units import format_bytes

_SUMS_BY_INDEX = ("index_add", "index_put", "scatter_add", "index_add_", "index_put_", "scatter_add_")


@dataclass(frozen=True)
class DeterministicPrice:
    """The additional costs of a step on one device with deterministic algorithms."""

    seconds_beside: float
    """Seconds by rule that the counted step's rooflines do not have."""
    share: float
    """More seconds of the device's operators, as a fraction of those of a step without."""
    more_bytes: int
    """More peak bytes; fewer are negative."""

    def describe(self) -> str:
        more = "+" if self.share >= 0 else ""
        sign = "+" if self.more_bytes >= 0 else "-"
        return f"deterministic: {more}{self.share:.1%} time, {sign}{format_bytes(abs(self.more_bytes))} (by rule)"


def deterministic_price(resolved: ResolvedRecipe, ledger: Ledger, ceilings: Ceilings) -> DeterministicPrice | None:
    """The price of a recipe's deterministic algorithms, whose step has that ledger; None where it asks for none, and
    for a CPU, which computes the same bits anyway."""
    target = cuda_target(resolved.counted_for)
    if not resolved.recipe.training.deterministic or target is None:
        return None
    usual = count_step(resolved.with_training(deterministic=False), reserved=False)
    beside = sum(seconds_beside(row, target, ceilings) for row in ledger.rows)
    before = price(usual, ceilings).seconds
    after = price(ledger, ceilings).seconds + beside
    return DeterministicPrice(beside, after / before - 1, ledger.peak_bytes - usual.peak_bytes)


def seconds_beside(row: Row, target: CudaTarget, ceilings: Ceilings) -> float:
    """Seconds of one call with deterministic algorithms that its roofline does not have."""
    if row.operator in _SUMS_BY_INDEX:
        moved = row.bytes_read + row.bytes_written
        return moved / ceilings.bandwidth(moved) if moved else 0.0
    flash = row.operator == "_scaled_dot_product_flash_attention_backward"
    if row.contraction is None or not (flash or row.operator == "_scaled_dot_product_efficient_attention_backward"):
        return 0.0
    heads, queries, _, head_dim = row.contraction
    sums = ordered_sums(heads, target) if flash else 1
    waves = -(-sums * heads // target.multiprocessors)
    idle = waves * target.multiprocessors / (sums * heads) - 1
    # Cleared, then read; once is part of every backward pass.
    moved = 2 * 4 * heads * queries * head_dim * sums if flash else 0
    return idle * roofline_seconds(row, ceilings) + (moved / ceilings.bandwidth(moved) if moved else 0.0)
