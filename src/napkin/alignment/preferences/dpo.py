"""Direct preference optimisation: the policy is its own reward model."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from napkin.alignment.preferences.pair_objective import PairObjective


def dpo_losses(
    chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], *, beta: float, label_smoothing: float = 0.0
) -> Float[Tensor, " pair"]:
    """-(1 - ε) log σ(h) - ε log σ(-h), h = β (chosen - rejected), of log-ratios log π(y | x) - log π_ref(y | x).

    Rafailov et al. 2023, equation 7; ε, the probability that a label is wrong: Mitchell 2023, "A note on DPO with noisy
    preferences".
    """
    difference = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(difference) - label_smoothing * logsigmoid(-difference)


@dataclass(frozen=True)
class DPOObjective(PairObjective):
    """`dpo_losses`, and the chosen answer's negative log-likelihood per token (Pang et al. 2024, equation 1) times
    `supervised_weight`."""

    label_smoothing: float = 0.0
    supervised_weight: float = 0.0

    @property
    def supervised_share(self) -> float:
        """See `PairObjective`."""
        return self.supervised_weight

    def pair_losses(self, chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
        """See `PairObjective`."""
        return dpo_losses(chosen, rejected, beta=self.beta, label_smoothing=self.label_smoothing)
