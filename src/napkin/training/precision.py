"""Precision as a policy: which format the matrix products run in."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from napkin.errors import NapkinError
from napkin.hardware.host import Host


@dataclass(frozen=True)
class Precision:
    """Weights, gradients, optimizer state and sums are fp32; `products` is the format of matrix products."""

    products: Literal["fp32", "bf16"]
    device_type: Literal["cpu", "cuda"]

    @property
    def bytes_a_number(self) -> int:
        """Of a matrix product's operands."""
        return 2 if self.products == "bf16" else 4

    def autocast(self) -> AbstractContextManager:
        """The context of a forward pass."""
        return torch.autocast(self.device_type, torch.bfloat16, enabled=self.products == "bf16")


def choose_precision(
    wanted: Literal["auto", "fp32", "bf16"], device_type: Literal["cpu", "cuda"], host: Host
) -> Precision:
    """Resolve "auto" for this machine; bf16 is refused nowhere, it is only slow where it is emulated."""
    native = host.native_bf16 if device_type == "cpu" else host.accelerators[0].native_bf16
    products = ("bf16" if native else "fp32") if wanted == "auto" else wanted
    return Precision(products, device_type)


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """Resolve "auto": the GPU if there is one."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise NapkinError("training.device is 'cuda', this machine has no GPU that torch can use: use 'cpu' or 'auto'")
    if wanted == "auto":
        return "cuda" if available else "cpu"
    return wanted
