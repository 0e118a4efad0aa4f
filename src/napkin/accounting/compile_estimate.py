"""Whether compiling pays: the seconds that fused operators save over a run, against those that the compiler takes.

A compiler fuses what stands between the matrix products of a block (norms, activations, changes of format, residual
sums) and leaves the products as they are. What it saves is a multiple of what rooflines give for those operators, whose
tensors would otherwise go through memory one by one. Rooflines, not microbenchmarks: they say the same each time.
"""

from dataclasses import dataclass

from napkin.accounting.ledger import Ledger
from napkin.accounting.pricing import price, roofline_seconds
from napkin.hardware.ceilings import Ceilings

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
"""Of a step's seconds by rooflines, on a CPU: more was never measured, and small operators' rooflines are mostly
calls."""
SECONDS = 26.0
"""Of compiling the forward and the backward pass of a block on a CPU, where the disk holds nothing of it yet, on two
cores of the same machine, whatever the number of layers; 5 where it does."""
ASSUMED_SECONDS_ON_GPU = 60.0
"""The same for a GPU: assumed, not measured."""


@dataclass(frozen=True)
class CompileEstimate:
    """What compiling costs and saves, and whether it was chosen."""

    chosen: bool = False
    why_not: str | None = None
    """What rules it out, whatever it would save."""
    seconds: float = 0.0
    """That compiling takes, once."""
    saved_per_step: float = 0.0
    """Seconds."""
    assumed: bool = False
    """Whether both figures are assumptions, for a device on which nothing was measured."""

    @property
    def seconds_once(self) -> float:
        """Of a run: none where nothing is compiled."""
        return self.seconds if self.chosen else 0.0

    @property
    def seconds_less(self) -> float:
        """Of each step: none where nothing is compiled."""
        return self.saved_per_step if self.chosen else 0.0

    def pays(self, steps: int) -> bool:
        """Whether so many steps save more seconds than compiling takes."""
        return steps * self.saved_per_step > self.seconds


NOT_COMPILED = CompileEstimate()


def estimate_compile(ledger: Ledger, ceilings: Ceilings, *, device_type: str, precision: str) -> CompileEstimate:
    """What compiling the blocks would take and save; `chosen` is left to the caller.

    A precision that nothing was measured of saves nothing.
    """
    fusible = fusible_seconds(ledger, ceilings)
    if device_type != "cpu":
        # Published runs with and without a compiler say what remains: `napkin.hardware.efficiency`.
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
