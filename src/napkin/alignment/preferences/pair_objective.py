"""What the objectives of pairs share: the mean over the pairs of a batch, the supervised term, and the figures."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from napkin.alignment.objective import BatchTotals, Figures
from napkin.alignment.preferences.answer_scores import (
    log_probabilities_of_answers,
    log_ratios_of_answers,
    pairs_of,
)
from napkin.alignment.sequence_packing import SequenceMicroBatch
from napkin.model.transformer import TokenScores


@dataclass(frozen=True)
class PairObjective:
    """The mean loss of pairs (chosen, rejected). Each objective says what a pair's loss is.

    An answer's implicit reward is beta times the log-probability that the objective compares.
    """

    beta: float
    per_token: bool = False
    """Whether an answer's log-probability is the mean over its tokens instead of the sum."""
    has_reference = True
    """Whether log-probabilities are taken beside those of a reference model."""

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Figures]:
        """See `Objective`."""
        score = log_ratios_of_answers if self.has_reference else log_probabilities_of_answers
        chosen, rejected = pairs_of(score(part, scores, per_token=self.per_token), part)
        likelihoods, _ = pairs_of(log_probabilities_of_answers(part, scores, per_token=True), part)
        losses = self.pair_losses(chosen, rejected) + self.supervised_share * -likelihoods
        sums, rejected_sums = pairs_of(log_probabilities_of_answers(part, scores), part)
        figures = pair_figures(self.beta * chosen, self.beta * rejected, totals)
        figures["chosen_log_probability"] = sums.detach().sum() / max(totals.units, 1)
        figures["rejected_log_probability"] = rejected_sums.detach().sum() / max(totals.units, 1)
        return losses.sum() / max(totals.units, 1), figures

    @property
    def supervised_share(self) -> float:
        """Weight of the negative log-likelihood of the chosen answer, per token."""
        return 0.0

    def pair_losses(self, chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
        """The loss of each pair, of its answers' log-probabilities or log-ratios."""
        raise NotImplementedError


def pair_figures(chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], totals: BatchTotals) -> Figures:
    """Of rewards: how often the chosen answer's is higher (equal ones count half), by how much, and both means."""
    chosen, rejected = chosen.detach(), rejected.detach()
    wins = (chosen > rejected).float() + 0.5 * (chosen == rejected).float()
    means = {"accuracy": wins, "margin": chosen - rejected, "chosen_reward": chosen, "rejected_reward": rejected}
    return {name: value.sum() / max(totals.units, 1) for name, value in means.items()}
