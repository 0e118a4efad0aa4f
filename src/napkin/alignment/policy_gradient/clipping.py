"""What limits a step away from the policy that answered: the terms of a policy's loss, one for each token.

Each function returns the terms, and at which tokens the limit acts.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Tokens = Float[Tensor, " token"]
Limited = Bool[Tensor, " token"]


def plain_terms(weights: Tokens, advantages: Tokens) -> Tokens:
    """-w · A, where w is a ratio (Schulman et al. 2017, equation 6) or a log-probability, as in REINFORCE."""
    return -weights * advantages


def pessimistic_terms(ratios: Tokens, advantages: Tokens, *, low: float, high: float) -> tuple[Tokens, Limited]:
    """-min(rho · A, clip(rho, 1 - low, 1 + high) · A): PPO (Schulman et al. 2017, equation 7); high > low is DAPO's
    clip-higher (Yu et al. 2025, equation 10).

    Where the clipped product is the smaller the term has no gradient; a step back is never limited.
    """
    plain = ratios * advantages
    clipped = ratios.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(plain, clipped), clipped < plain


def weighted_terms(
    log_probabilities: Tokens, ratios: Tokens, advantages: Tokens, *, low: float, high: float
) -> tuple[Tokens, Limited]:
    """-stop(clip(rho, 1 - low, 1 + high)) · A · log pi: CISPO (MiniMax 2025, equations 4 and 5).

    The ratio is a weight without gradient, so that every token keeps one. low = 1 or more is no lower bound.
    """
    weights = ratios.detach().clamp(1 - low, 1 + high)
    return -weights * advantages * log_probabilities, weights != ratios
