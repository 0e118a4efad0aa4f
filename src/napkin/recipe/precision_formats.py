"""What is in which number format, by precision: the table that stands before a run and in its report. No torch here."""

from dataclasses import dataclass
from typing import Literal

PrecisionName = Literal["fp32", "bf16", "fp16", "bf16-pure", "fp8"]


@dataclass(frozen=True)
class Usage:
    """One kind of number and its format."""

    what: str
    format: str


def usage_of(name: PrecisionName, *, native_fp8: bool = False) -> list[Usage]:
    """The formats of a policy."""
    wide, products, update = "fp32", name, "fp32"
    if name == "bf16-pure":
        wide, products, update = "bf16", "bf16", "fp32, rounded stochastically to bf16"
    if name == "fp8":
        how = "" if native_fp8 else ", emulated: rounded to fp8, multiplied in bf16"
        products = f"fp8-e4m3 forward, fp8-e5m2 gradients, in the blocks' linear layers{how}; elsewhere bf16"
    copies = "" if name in ("fp32", "bf16-pure") else f", cast to {'bf16' if name == 'fp8' else name} for products"
    rows = [
        Usage("weights", wide + copies),
        Usage("gradients", wide),
        Usage("optimizer state", "fp32"),
        Usage("update", update),
        Usage("matrix products", products),
        Usage("sums (norms, softmax, loss)", "fp32"),
    ]
    if name == "fp16":
        rows.append(Usage("loss", "scaled by a power of two, halved on overflow, doubled after 1000 good steps"))
    return rows
