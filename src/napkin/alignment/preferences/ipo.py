"""Identity preference optimisation: a difference is regressed, so that it stays bounded where every pair agrees."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from napkin.alignment.preferences.pair_objective import PairObjective


def ipo_losses(
    chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], *, beta: float
) -> Float[Tensor, " pair"]:
    """(chosen - rejected - 1 / (2 β))², of log-ratios log π(y | x) - log π_ref(y | x).

    Azar et al. 2023, equation 17, whose τ is β here. The recipe's objective takes the means of log-ratios per token:
    with sums, one target for answers of all lengths would be a different one per token for each.
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


@dataclass(frozen=True)
class IPOObjective(PairObjective):
    """`ipo_losses`."""

    def pair_losses(self, chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
        """See `PairObjective`."""
        return ipo_losses(chosen, rejected, beta=self.beta)
