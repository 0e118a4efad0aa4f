"""Answers that come near to the longest that is allowed, or are cut there."""

from jaxtyping import Float, Int
from torch import Tensor


def overlong_penalty(
    lengths: Int[Tensor, "group answer"], *, max_length: int, window: int
) -> Float[Tensor, "group answer"]:
    """What an answer's reward is changed by for its length: DAPO's soft punishment (Yu et al. 2025, equation 13).

    0 up to max_length - window tokens, then evenly down to -1 at max_length.
    """
    return -((lengths.double() - (max_length - window)) / window).clamp(0, 1)
