"""The plan of a run, before its first step: what count and rule say, and whether it fits."""

from dataclasses import dataclass

from napkin.accounting.ledger import Ledger
from napkin.accounting.price import Price
from napkin.accounting.rules import adamw_bytes_rule, seconds_rule, training_flops_rule
from napkin.accounting.witnesses import WitnessRow
from napkin.units import format_flops

RULE_MFU = 0.5


@dataclass(frozen=True)
class Plan:
    """A run as predicted: a ledger, its price, and the machine they are for."""

    ledger: Ledger
    price: Price
    rule_parameters: int
    """Parameters by the closed form."""
    steps: int
    tokens_per_step: int
    device_name: str
    matmul_peak: float
    """FLOP/s, dense, measured on this device in the format of the matrix products."""
    memory_bytes: int
    """What the device has for tensors."""
    calibration_disturbed: bool = False
    """Whether other programs held the machine while it was measured: seconds may be too many, peaks too low."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.ledger.peak_bytes <= self.memory_bytes

    @property
    def seconds(self) -> float:
        """Of all steps; evaluations and checkpoints come on top."""
        return self.steps * self.price.seconds

    @property
    def mfu(self) -> float:
        """Predicted model-FLOPs utilisation."""
        return mfu(self.ledger, self.price.seconds, self.matmul_peak)

    def table(self) -> list[WitnessRow]:
        """Rule and count, side by side; `reconcile` adds the meter."""
        parameters = self.ledger.parameters
        rule_flops = training_flops_rule(self.rule_parameters, self.tokens_per_step)
        rule_seconds = seconds_rule(rule_flops, self.matmul_peak, mfu=RULE_MFU)
        return [
            WitnessRow(
                "parameters",
                "count",
                self.rule_parameters,
                parameters,
                note="rule 12·L·d² + V·d: no norms, widths not rounded",
            ),
            WitnessRow("FLOPs a step", "FLOP", rule_flops, self.ledger.flops, note=self._why_flops_differ()),
            WitnessRow(
                "peak bytes",
                "bytes",
                adamw_bytes_rule(self.rule_parameters),
                self.ledger.peak_bytes,
                note="rule 16 bytes a parameter: no activations, no logits, no batch",
            ),
            WitnessRow(
                "seconds a step",
                "seconds",
                rule_seconds,
                self.price.seconds,
                note=f"rule: MFU {RULE_MFU}; count: each operator alone, on this machine; "
                f"{self.price.byte_bound_share:.0%} of the time bound by bytes",
            ),
            WitnessRow(
                "MFU",
                "share",
                RULE_MFU,
                self.mfu,
                note="of the matmul peak measured on this machine; full attention, no recomputation",
            ),
            WitnessRow(
                "seconds in all",
                "seconds",
                self.steps * rule_seconds,
                self.seconds,
                note=f"{self.steps} steps; the meter includes evaluations and checkpoints",
            ),
        ]

    def _why_flops_differ(self) -> str:
        ledger = self.ledger
        attention = sum(flops for operator, flops in ledger.flops_by("operator").items() if "attention" in operator)
        return (
            f"rule 6·N·T leaves attention out: {attention / ledger.flops:.1%} of count; "
            f"causal pairs alone: {format_flops(ledger.causal_flops)} in all"
        )


def mfu(ledger: Ledger, seconds: float, matmul_peak: float) -> float:
    """Model-FLOPs utilisation: FLOPs of a step, recomputation left out, a second, over the dense peak.

    Chowdhery et al. 2022, "PaLM", appendix B; with attention counted over all pairs.
    """
    return ledger.flops / seconds / matmul_peak


def hfu(ledger: Ledger, seconds: float, matmul_peak: float) -> float:
    """Hardware-FLOPs utilisation: the same with recomputation counted."""
    return ledger.hardware_flops / seconds / matmul_peak
