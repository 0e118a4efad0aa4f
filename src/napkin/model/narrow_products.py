"""Which linear layers of a model multiply in a format of 8 bits."""

from torch import nn

from napkin.kernels.narrow_forms import Multiply, takes_narrow
from napkin.model.linear import Linear


def multiply_narrow(blocks: nn.Module, multiply: Multiply) -> None:
    """Let all linear layers inside `blocks` multiply in a form of `napkin.kernels.narrow_forms`.

    Routers stay as they are, since their choices depend on small differences, and so do layers whose sizes the
    hardware does not take.
    """
    for name, module in blocks.named_modules():
        if isinstance(module, Linear) and not name.endswith("router") and takes_narrow(module.weight):
            module.multiply = multiply
