"""Which linear layers of a model multiply in fp8."""

from torch import nn

from napkin.kernels.fp8_matmul import fp8_linear, fp8_linear_emulated, takes_fp8
from napkin.model.linear import Linear


def multiply_in_fp8(blocks: nn.Module, *, native: bool) -> None:
    """Let all linear layers inside `blocks` multiply in fp8; `native` uses the hardware's fp8 product.

    Routers stay as they are, since their choices depend on small differences, and so do layers whose sizes the
    hardware does not take.
    """
    for name, module in blocks.named_modules():
        if isinstance(module, Linear) and not name.endswith("router") and takes_fp8(module.weight):
            module.multiply = fp8_linear if native else fp8_linear_emulated
