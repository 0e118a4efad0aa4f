"""A step on sequences is counted as it runs: the same operators, FLOPs and peak bytes."""

import dataclasses

import pytest
import torch

from napkin.accounting.metering import METERED_STEP, StepMeasurement, metering
from napkin.alignment.objective import Objective
from napkin.alignment.sequence_ledger import count_step_on_units
from napkin.alignment.sequence_packing import Arrangement
from napkin.alignment.sequence_step import train_on_units
from napkin.alignment.supervised import SupervisedObjective
from oracles.alignment_cases import MODEL, some_units, train_state_of

WIDE = dataclasses.replace(MODEL, vocab_size=300, d_model=32)


@pytest.mark.parametrize("arrangement", ["packed", "padded", "padded left"])
@pytest.mark.parametrize("max_tokens", [40, 10_000])
def test_a_step_on_sequences_has_the_flops_and_bytes_that_were_counted(
    arrangement: Arrangement, max_tokens: int
) -> None:
    train_state, units = train_state_of(model=WIDE), some_units()
    objective: Objective = SupervisedObjective()
    how = {"max_tokens": max_tokens, "arrangement": arrangement}
    counted = count_step_on_units(train_state.resolved, units, objective, **how)
    measured: list[StepMeasurement] = []
    for number in range(METERED_STEP):
        train_on_units(train_state, number, units, objective, **how)
    with metering(train_state.model, measured.append, device=torch.device("cpu")):
        train_on_units(train_state, METERED_STEP, units, objective, **how)
    (metered,) = measured
    operators = [[row.operator for row in ledger.rows if row.flops] for ledger in (metered.ledger, counted)]
    assert operators[0] == operators[1]
    assert metered.ledger.flops == counted.flops
    print(metered.peak_bytes, counted.peak_bytes)
    assert metered.peak_bytes == pytest.approx(counted.peak_bytes, rel=1e-3)
