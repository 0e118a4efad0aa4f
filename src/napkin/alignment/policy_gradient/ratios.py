"""Importance ratios: the probability of a token now over that when it was drawn."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

Tokens = Float[Tensor, " token"]


def token_ratios(log_probabilities: Tokens, old_log_probabilities: Tokens) -> Tokens:
    """pi(token) / pi_old(token), as in PPO (Schulman et al. 2017, equation 6)."""
    return (log_probabilities - old_log_probabilities).exp()


def sequence_ratios(
    log_probabilities: Tokens, old_log_probabilities: Tokens, sequence: Int[Tensor, " token"], n_sequences: int
) -> Tokens:
    """(pi(answer) / pi_old(answer))^(1/length), the geometric mean of the tokens' ratios, for each token of the answer:
    GSPO (Zheng et al. 2025, equation 7).

    `sequence` is the number of each token's sequence. The gradient reaches all tokens of the sequence.
    """
    differences = log_probabilities - old_log_probabilities
    none = torch.zeros(n_sequences, dtype=differences.dtype, device=differences.device)
    sums = none.index_add(0, sequence, differences)
    lengths = none.index_add(0, sequence, torch.ones_like(differences))
    return (sums / lengths.clamp(min=1)).exp()[sequence]


def truncated_sampler_ratios(
    old_log_probabilities: Tokens, sampler_log_probabilities: Tokens, limit: float
) -> Float[Tensor, " token"]:
    """min(pi_old / pi_sampler, limit): a weight that corrects for a sampler whose arithmetic is not the trainer's
    (truncated importance sampling: Ionides 2008; Yao et al. 2025). Without gradient."""
    return (old_log_probabilities - sampler_log_probabilities).exp().clamp(max=limit).detach()
