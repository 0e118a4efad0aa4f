"""Supervised fine-tuning: the negative log-likelihood of the tokens that count."""

from dataclasses import dataclass
from hashlib import sha256

from jaxtyping import Float
from torch import Tensor

from napkin.errors import NapkinError
from napkin.model.transformer import TokenScores
from napkin.tuning.example_method import ExampleMethod, open_examples
from napkin.tuning.method import TuningContext
from napkin.tuning.objective import BatchTotals, Metrics, Normalisation, normalised_sum, normalised_weights
from napkin.tuning.packing import SequenceMicroBatch


@dataclass(frozen=True)
class SupervisedObjective:
    """-log p(token), averaged by `normalisation`; `constant` is the divisor of "constant"."""

    normalisation: Normalisation = "token"
    constant: float | None = None

    def coefficients(self, part: SequenceMicroBatch, totals: BatchTotals) -> Float[Tensor, " token"]:
        return -normalised_weights(part, totals, self.normalisation, self.constant)

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Metrics]:
        loss = scores.weighted_sum
        if loss is None:
            loss = normalised_sum(-scores.log_probabilities, part, totals, self.normalisation, self.constant)
        entropy = scores.entropies.detach().sum() / max(totals.tokens, 1)
        return loss, {"entropy": entropy}


class SupervisedMethod(ExampleMethod):
    """Trains on conversations: data.train and data.validation are JSON lines, or files of `napkin data chat`."""

    @classmethod
    def open(cls, context: TuningContext) -> "SupervisedMethod":
        tuning, longest = context.recipe.tuning, longest_sequence(context)
        if not context.encoder.end_ids:
            context.setting.on_message(
                "the chat template ends answers with text and not with a special token: the tuned model may not know "
                "where to end"
            )
        train, held_out = open_examples(context, "conversations", max_length=longest)
        checksum = train.checksum
        if held_out is not None:
            checksum = sha256(f"{train.checksum} {held_out.checksum}".encode()).hexdigest()
        objective = SupervisedObjective(tuning.normalisation, float(longest))
        return cls(context, train, held_out or (), checksum, objective)


def longest_sequence(context: TuningContext) -> int:
    """The most tokens of a sequence. Raises NapkinError for more than the model's context length."""
    chosen, limit = context.recipe.tuning.max_length, context.recipe.model.context_length
    if chosen > limit:
        raise NapkinError(f"tuning.max_length is {chosen:,}, the model's context length is {limit:,}: use at most that")
    return chosen or limit
