"""Odds ratio preference optimisation: supervised tuning that also moves the odds from one answer to the other."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from napkin.alignment.preferences.pair_objective import PairObjective

_HIGHEST = -1e-6
"""Log-probability per token above which the odds are taken as those of this: they are infinite at 0."""


def orpo_losses(
    chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], *, beta: float
) -> Float[Tensor, " pair"]:
    """-chosen - β log σ(log odds(chosen) - log odds(rejected)), of mean log-probabilities per token; odds(p) = p / (1 -
    p).

    Hong et al. 2024, equations 4 to 7, whose λ is β here.
    """
    return -chosen - beta * logsigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(log_probabilities: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """log(p / (1 - p)), of log p."""
    bounded = log_probabilities.clamp(max=_HIGHEST)
    # log(1 - p): each form where it is exact. The other's argument is kept from where its gradient is not finite.
    near_one = bounded > -math.log(2)
    of_large = torch.log(-torch.expm1(torch.where(near_one, bounded, -1.0)))
    of_small = torch.log1p(-torch.exp(torch.where(near_one, -1.0, bounded)))
    return bounded - torch.where(near_one, of_large, of_small)


@dataclass(frozen=True)
class ORPOObjective(PairObjective):
    """`orpo_losses`."""

    per_token: bool = True
    has_reference = False

    def pair_losses(self, chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
        """See `PairObjective`."""
        return orpo_losses(chosen, rejected, beta=self.beta)
