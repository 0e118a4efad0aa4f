"""Linear layers with products in a format of 8 bits: the form that a device takes, and which weights it takes."""

from collections.abc import Callable
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from napkin.kernels.fp8_matmul import MULTIPLE, fp8_linear, fp8_linear_emulated
from napkin.kernels.int8_matmul import compiled_int8_linear, int8_linear, int8_linear_emulated

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x, weight and bias to x · weightᵀ + bias."""

_FORMS: dict[str, dict[str, Multiply]] = {
    "fp8": {"cuda": fp8_linear, "emulated": fp8_linear_emulated},
    "int8": {"cuda": int8_linear, "cpu": compiled_int8_linear, "emulated": int8_linear_emulated},
}
_ALL = frozenset(form for forms in _FORMS.values() for form in forms.values())


def narrow_linear(format_name: Literal["fp8", "int8"], form: Literal["emulated", "cpu", "cuda"]) -> Multiply:
    """The form for hardware that multiplies the format, or the one for any other; a CPU's fp8 is emulated."""
    forms = _FORMS[format_name]
    return forms.get(form, forms["emulated"])


def is_narrow(multiply: Multiply) -> bool:
    """Whether that is one of these forms."""
    return multiply in _ALL


def takes_narrow(weight: Float[Tensor, "out_features in_features"]) -> bool:
    """Whether hardware multiplies a weight of this shape in 8 bits."""
    return all(size % MULTIPLE == 0 for size in weight.shape)
