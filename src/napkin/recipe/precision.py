"""Precision as a policy: the formats of weights, gradients, optimizer state, matrix products and sums.

Does not import torch at import time: the command line reads the table of formats for its help.
"""

import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from napkin.errors import NapkinError
from napkin.hardware.host import Host
from napkin.machine_code.processor import has_exact_int8, has_native_bf16

if TYPE_CHECKING:
    import torch

PrecisionName = Literal["fp32", "bf16", "fp16", "bf16-pure", "fp8", "int8"]

NarrowForm = Literal["emulated", "cpu", "cuda"]

NARROW = ("fp8", "int8")
"""Formats that are bf16 but for products of the blocks' linear layers, which are in 8 bits."""

# Ada and Hopper: cuBLAS has no fp8 for earlier architectures. Ampere: the first whose int8 products torch tests.
_FIRST_CAPABILITY = {"fp8": (8, 9), "int8": (8, 0)}


@dataclass(frozen=True)
class Precision:
    """A named policy, on a kind of device.

    fp32: everything in fp32. bf16, fp16: autocast over fp32 weights; fp16 with a loss scale. bf16-pure: weights and
    gradients in bf16, updates computed in fp32 and rounded stochastically. fp8, int8: as bf16, with products of the
    blocks' linear layers in that format: of fp8 all three, of int8 the forward product and the gradient of the input.
    """

    name: PrecisionName
    device_type: Literal["cpu", "cuda"]
    narrow_form: NarrowForm = "emulated"
    """The device's form of products in fp8 or int8; emulated: rounded to the format, multiplied in bf16."""

    @property
    def products(self) -> Literal["fp32", "bf16", "fp16"]:
        """The format whose matmul peak MFU is relative to; that of head and attention for fp8 and int8: bf16."""
        return self.name if self.name in ("fp32", "fp16") else "bf16"

    @property
    def products_dtype(self) -> "torch.dtype":
        """Format of products, as a torch dtype."""
        import torch

        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.products]

    @property
    def weights_dtype(self) -> "torch.dtype":
        import torch

        return torch.bfloat16 if self.name == "bf16-pure" else torch.float32

    @property
    def bytes_per_weight(self) -> int:
        """Bytes of a parameter, and of its gradient."""
        return 2 if self.name == "bf16-pure" else 4

    @property
    def emulates_bf16(self) -> bool:
        """True if this machine's CPU would multiply bf16 without native instructions for it."""
        return self.device_type == "cpu" and self.products == "bf16" and not has_native_bf16()

    def autocast(self) -> AbstractContextManager:
        import torch

        wanted = self.name not in ("fp32", "bf16-pure")
        return torch.autocast(self.device_type, self.products_dtype if wanted else torch.bfloat16, enabled=wanted)

    def on(self, device_type: Literal["cpu", "cuda"]) -> "Precision":
        return dataclasses.replace(self, device_type=device_type)

    def usage(self) -> "list[Usage]":
        return usage_of(self.name, self.narrow_form)


def choose_precision(
    wanted: Literal["auto"] | PrecisionName, device_type: Literal["cpu", "cuda"], host: Host
) -> Precision:
    """Resolve "auto" for this machine. bf16 is always allowed; without native instructions it is emulated, and slow.

    Raises NapkinError for fp16 on a CPU, which has no fast fp16 matrix product.
    """
    native = host.native_bf16 if device_type == "cpu" else host.accelerators[0].native_bf16
    if wanted == "auto":
        return Precision("bf16" if native else "fp32", device_type)
    if wanted == "fp16" and device_type == "cpu":
        raise NapkinError(
            "training.precision is 'fp16', which a CPU multiplies a hundred times slower than fp32: use 'bf16' or "
            "'fp32', or a GPU"
        )
    return Precision(wanted, device_type, _narrow_form(wanted, device_type))


def _narrow_form(name: PrecisionName, device_type: Literal["cpu", "cuda"]) -> NarrowForm:
    if name not in NARROW:
        return "emulated"
    if device_type == "cpu":
        # torch multiplies fp8 on a CPU, more slowly than bf16.
        native = name == "int8" and has_exact_int8()
    else:
        import torch

        native = torch.cuda.get_device_capability() >= _FIRST_CAPABILITY[name]
    return device_type if native else "emulated"


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    import torch

    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise NapkinError(
            "training.device is 'cuda', but this machine has no GPU that torch can use: use 'cpu' or 'auto'"
        )
    if wanted == "auto":
        return "cuda" if available else "cpu"
    return wanted


@dataclass(frozen=True)
class Usage:
    """One kind of number and its format."""

    what: str
    format: str


def usage_of(name: PrecisionName, narrow_form: NarrowForm = "emulated") -> list[Usage]:
    wide, products, update = "fp32", name, "fp32"
    if name == "bf16-pure":
        wide, products, update = "bf16", "bf16", "fp32, rounded stochastically to bf16"
    if name in NARROW:
        how = "" if narrow_form != "emulated" else f", emulated: rounded to {name}, multiplied in bf16"
        which = {"fp8": "fp8-e4m3 forward, fp8-e5m2 gradients", "int8": "int8 forward and for gradients of inputs"}
        products = f"{which[name]}, in the blocks' linear layers{how}; otherwise bf16"
    copies = "" if name in ("fp32", "bf16-pure") else f", cast to {'bf16' if name in NARROW else name} for products"
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
