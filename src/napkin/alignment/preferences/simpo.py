"""Simple preference optimisation: mean log-probabilities with a target margin, and no reference."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from napkin.alignment.preferences.pair_objective import PairObjective


def simpo_losses(
    chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], *, beta: float, margin: float = 0.0
) -> Float[Tensor, " pair"]:
    """-log σ(β (chosen - rejected) - γ), of mean log-probabilities per token; γ is `margin`.

    Meng et al. 2024, equation 6.
    """
    return -logsigmoid(beta * (chosen - rejected) - margin)


@dataclass(frozen=True)
class SimPOObjective(PairObjective):
    """`simpo_losses`."""

    per_token: bool = True
    margin: float = 0.0
    has_reference = False

    def pair_losses(self, chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
        """See `PairObjective`."""
        return simpo_losses(chosen, rejected, beta=self.beta, margin=self.margin)
