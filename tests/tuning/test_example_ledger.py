"""A step on examples is counted as it runs: the same operators, FLOPs and peak bytes."""

import dataclasses

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from napkin.accounting.ledger import METERED_STEP
from napkin.accounting.metering import StepMeasurement, metering
from napkin.model.transformer import TokenScores
from napkin.tuning.example_method import SupervisedObjective
from napkin.tuning.example_plan import count_examples
from napkin.tuning.packing import Packing, SequenceMicroBatch, micro_batches_of
from napkin.tuning.sequence_step import BatchTotals, Metrics, Objective, score_examples, totals_of, train_on_examples
from oracles.alignment_cases import MODEL, some_examples, train_state_of

WIDE = dataclasses.replace(MODEL, vocab_size=300, d_model=32)


class ReadsEntropies:
    """An objective that nobody knows the slopes of before the forward pass."""

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Metrics]:
        return (scores.entropies.square() - scores.log_probabilities).sum() / totals.tokens, {}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("objective", "packing", "max_tokens", "n_scored"),
    [
        (SupervisedObjective(), "packed", 40, 0),
        (ReadsEntropies(), "padded left", 10_000, 0),
        (SupervisedObjective(), "packed", 40, 5),
    ],
)
def test_a_step_on_units_has_the_flops_and_bytes_that_were_counted(
    objective: Objective, packing: Packing, max_tokens: int, n_scored: int
) -> None:
    """The last case computes other examples without gradients first."""
    train_state, examples = train_state_of(model=WIDE), some_examples()
    scored = some_examples(n_scored)

    def train(number: int) -> None:
        if scored:
            score_examples(train_state.parallel_model, scored, max_tokens=max_tokens, packing=packing)
        train_on_examples(train_state, number, examples, objective, max_tokens=max_tokens, packing=packing)

    parts, before = (
        micro_batches_of(each, max_tokens=max_tokens, row_length=WIDE.context_length, packing=packing)
        for each in (examples, scored)
    )
    counted = count_examples(train_state.resolved, parts, totals_of(parts), objective, before)
    measured: list[StepMeasurement] = []
    for number in range(METERED_STEP):
        train(number)
    with metering(train_state.model, measured.append, device=torch.device("cpu")):
        train(METERED_STEP)
    (metered,) = measured
    operators = [[row.operator for row in ledger.rows if row.flops] for ledger in (metered.ledger, counted)]
    assert operators[0] == operators[1]
    assert metered.ledger.flops == counted.flops
    # The norm, the loss and the figures of the step besides.
    assert metered.peak_bytes == pytest.approx(counted.peak_bytes, rel=1e-3)
