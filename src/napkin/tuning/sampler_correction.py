"""How far the sampler's log-probabilities are from the trainer's, and weights that correct for it.

The weights, by rho = pi_old / pi_sampler of a token, or of a whole completion, the product over its tokens:

    correction       weight of a token              source
    token            min(rho, C)                    truncated importance sampling: Ionides 2008; Yao et al. 2025
    token mask       rho if 1/C <= rho <= C, or 0   masked on both sides: Ling team 2025 (IcePop)
    sequence         min(rho, C) of its completion  Liu et al. 2025 (training-inference mismatch)
    sequence mask    that rho if it is <= C, or 0   the same, masked

A token's ratio leaves out how likely the tokens before it were: its weight is biased, and its variance small. A
completion's is unbiased but for C, and grows with its length.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from napkin.recipe.tuning_recipe import SamplerCorrection

Tokens = Float[Tensor, " token"]


def sampler_weights(
    correction: SamplerCorrection,
    old_log_probabilities: Tokens,
    sampler_log_probabilities: Tokens,
    limit: float,
    sequence: Int[Tensor, " token"],
    n_sequences: int,
) -> tuple[Tokens, Bool[Tensor, " token"]]:
    """Weights of the table above, without gradient, and the tokens at which the limit acts."""
    logarithms = (old_log_probabilities - sampler_log_probabilities).detach()
    if correction.startswith("sequence"):
        none = torch.zeros(n_sequences, dtype=logarithms.dtype, device=logarithms.device)
        logarithms = none.index_add(0, sequence, logarithms)[sequence]
    most = math.log(limit)
    limited = logarithms > most
    # Before the exponential, which the sum over a long completion would overflow.
    weights = logarithms.clamp(max=most).exp()
    if correction == "token mask":
        limited = limited | (logarithms < -most)
    return (weights.masked_fill(limited, 0.0) if correction.endswith("mask") else weights), limited


def sampler_gap(sampler: Float[Tensor, " token"], trainer: Float[Tensor, " token"]) -> dict[str, Tensor]:
    """|log p(sampler) - log p(trainer)| of each token, and its part of KL(sampler ‖ trainer) by k3 (Schulman 2020)."""
    ahead = trainer - sampler
    return {"sampler_gap": ahead.abs(), "sampler_kl": ahead.expm1() - ahead}
