"""Rotary positions stretched: angles that a model was trained on, made to last for a longer context.

Each function takes the frequencies θ^(-2i/head_dim), in radians a token, and gives those to use, with a factor for the
length of the turned vectors.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Frequencies = Float[Tensor, " half_head_dim"]
Stretched = tuple[Float[Tensor, " half_head_dim"], float]


def unscaled(frequencies: Frequencies, theta: float, factor: float, original_context: float) -> Stretched:
    """As they are."""
    return frequencies, 1.0


def linear(frequencies: Frequencies, theta: float, factor: float, original_context: float) -> Stretched:
    """Every angle divided by the factor: positions interpolated (Chen et al. 2023)."""
    return frequencies / factor, 1.0


def ntk(frequencies: Frequencies, theta: float, factor: float, original_context: float) -> Stretched:
    """A larger base: the slowest angle is divided by the factor, the fastest stays ("NTK-aware", Peng et al. 2023,
    section 3.1)."""
    half = len(frequencies)
    ramp = torch.arange(half, dtype=frequencies.dtype, device=frequencies.device) / (half - 1)
    return frequencies * factor**-ramp, 1.0


def yarn(frequencies: Frequencies, theta: float, factor: float, original_context: float) -> Stretched:
    """Angles that turn 32 times or more in the original context stay, those that turn once or less are divided by the
    factor, with a ramp between; vectors longer by 0.1 · ln(factor) + 1 (Peng et al. 2023, section 3.2 to 3.4)."""
    half = len(frequencies)

    def place_of(turns: float) -> float:
        return half * math.log(original_context / (turns * 2 * math.pi)) / math.log(theta)

    first, last = max(math.floor(place_of(32)), 0), min(math.ceil(place_of(1)), 2 * half - 1)
    ramp = (torch.arange(half, dtype=frequencies.dtype, device=frequencies.device) - first) / max(last - first, 1e-3)
    stretched = ramp.clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / factor * stretched, 0.1 * math.log(factor) + 1


def llama3(frequencies: Frequencies, theta: float, factor: float, original_context: float) -> Stretched:
    """Wavelengths below a quarter of the original context stay, those above it are stretched by the factor, with a
    ramp of the angles between (Llama 3.1's reference code)."""
    turns = original_context * frequencies / (2 * math.pi)
    kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return frequencies * kept + frequencies / factor * (1 - kept), 1.0


ROPE_SCALINGS: dict[str, Callable[[Frequencies, float, float, float], Stretched]] = {
    "none": unscaled,
    "linear": linear,
    "ntk": ntk,
    "yarn": yarn,
    "llama3": llama3,
}
